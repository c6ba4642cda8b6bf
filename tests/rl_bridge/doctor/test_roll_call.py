"""Hosts that tell each other what they are: one that is missing, there twice, or other than the rest has a name."""

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


def rendezvous(node_rank: int) -> Rendezvous:
    return Rendezvous(
        address="h:1", num_nodes=3, node_rank=node_rank, per_host=1, on_gpus=False, megabytes=1, timeout_s=0.0
    )


def called(store: MemoryStore, node_rank: int, own: HostFacts) -> list[HostFacts]:
    return exchange_facts(store, rendezvous(node_rank), own, reports=True)


def facts(name: str, **changes: object) -> HostFacts:
    usual = HostFacts(host=name, num_nodes=3, per_host=1, on_gpu=False, versions=VERSIONS)
    return usual.model_copy(update=changes)


def told(store: MemoryStore, hosts: Sequence[tuple[int, HostFacts]]) -> MemoryStore:
    for rank, one in hosts:
        store.set(f"host/{rank}", one.model_dump_json())
    return store


def test_all_that_came_are_told_in_their_order() -> None:
    store = told(MemoryStore(), [(2, facts("c")), (0, facts("a"))])
    assert [one.host for one in called(store, 1, facts("b"))] == ["a", "b", "c"]
    assert json.loads(store.get("host/1"))["host"] == "b"


def test_a_host_that_does_not_come_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"no host joined as --node_rank 1 within 0 s"):
        called(MemoryStore(), 0, facts("a"))


def test_a_rank_that_is_there_twice_is_named() -> None:
    store = told(MemoryStore(), [(0, facts("a"))])
    store.add("came/1", 1)
    with pytest.raises(RendezvousError, match=r"two hosts joined as --node_rank 1, b is one of them"):
        called(store, 1, facts("b"))


@pytest.mark.parametrize("changes", [{"num_nodes": 4}, {"per_host": 8}])
def test_hosts_that_were_told_something_else(changes: dict[str, object]) -> None:
    store = told(MemoryStore(), [(0, facts("a", **changes))])
    with pytest.raises(
        RendezvousError, match="the same --num_nodes and --procs on every host, got 3 and 1 on b"
    ):
        called(store, 1, facts("b"))
    # So that the other one can say it too.
    assert store.check(["host/1"])


def test_a_store_that_goes_away_is_the_first_hosts() -> None:
    class Gone(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(
        RendezvousError,
        match="lost the connection to host 0, where all hosts meet; see its output: Connection",
    ):
        called(Gone(), 1, facts("b"))


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
