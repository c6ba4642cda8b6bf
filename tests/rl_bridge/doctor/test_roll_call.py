"""Hosts exchange their facts: a missing, duplicate or different host is named."""

import json
import threading
from collections.abc import Sequence

import pytest

from rl_bridge.doctor.collectives import (
    HostFacts,
    Rendezvous,
    RendezvousError,
    _compare_versions,
    _report_results,
    exchange_facts,
)
from rl_bridge.doctor.host import Severity

VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}


class MemoryStore:
    """What torch.distributed's store does, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            number = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(number).encode()
            return number

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def exchange(store: MemoryStore, node_rank: int, own: HostFacts) -> list[HostFacts]:
    settings = Rendezvous(
        address="h:1", num_nodes=3, node_rank=node_rank, per_host=1, on_gpus=False, timeout_s=0.0
    )
    return exchange_facts(store, settings, own, reports=True)


def facts(name: str, **changes: object) -> HostFacts:
    usual = HostFacts(host=name, num_nodes=3, per_host=1, on_gpu=False, versions=VERSIONS)
    return usual.model_copy(update=changes)


def with_hosts(store: MemoryStore, hosts: Sequence[tuple[int, HostFacts]]) -> MemoryStore:
    for rank, one in hosts:
        store.set(f"host/{rank}", one.model_dump_json())
    return store


def test_facts_come_in_the_order_of_ranks_and_a_rank_that_is_missing_or_taken_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"no host joined as --node_rank 1 within 0 s"):
        exchange(MemoryStore(), 0, facts("a"))
    store = with_hosts(MemoryStore(), [(2, facts("c")), (0, facts("a"))])
    assert [one.host for one in exchange(store, 1, facts("b"))] == ["a", "b", "c"]
    assert json.loads(store.get("host/1"))["host"] == "b"
    with pytest.raises(RendezvousError, match=r"two hosts joined as --node_rank 1, b is one of them"):
        exchange(store, 1, facts("b"))


@pytest.mark.parametrize("changes", [{"num_nodes": 4}, {"per_host": 8}])
def test_hosts_with_other_options_are_refused(changes: dict[str, object]) -> None:
    store = with_hosts(MemoryStore(), [(0, facts("a", **changes))])
    with pytest.raises(RendezvousError, match=r"the same --num_nodes and --procs .* got 3 and 1 on b"):
        exchange(store, 1, facts("b"))
    # So that the other one can say it too.
    assert store.check(["host/1"])


def test_lost_store_is_blamed_on_host_0() -> None:
    class Gone(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RendezvousError, match=r"lost the connection to host 0.*: Connection reset"):
        exchange(Gone(), 1, facts("b"))


def test_versions_that_differ_are_said() -> None:
    other = facts("c", versions={"torch": "2.12.0", "vllm": "1"})
    (found,) = _compare_versions([facts("a"), facts("b"), other])
    assert found.level is Severity.BAD
    assert found.told == "expected one of torch, got 2.13.0 on a, b; 2.12.0 on c"
    (same,) = _compare_versions([facts("a"), facts("b", versions={"vllm": "1"})])
    assert same.level is Severity.GOOD
    assert list(_compare_versions([facts("a")])) == []


def test_a_wrong_sum_on_any_process_is_said() -> None:
    pair = Rendezvous(address="h:1", num_nodes=1, node_rank=0, per_host=2, on_gpus=False)
    measured = {"backend": "gloo", "right": True, "small_us": 1.0, "reduce_gbps": 1.0, "pair_gbps": {}}
    (right,) = list(_report_results(pair, [facts("a")], [measured, measured]))
    (wrong,) = _report_results(pair, [facts("a")], [measured, measured | {"right": False}])
    assert (right.level, wrong.level) == (Severity.GOOD, Severity.BAD)
    assert "wrong sum" in wrong.told
