"""The store between real processes of a run, of which some are killed."""

import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from missing import missing

from rl_bridge.errors import MissingStack, ReplicaLost, RoleFailed, WeightsError

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
EVERY_TRANSPORT = pytest.mark.parametrize("transport", ["shared_memory", "rdma", "torchstore"])
OF_THE_PUBLISHER = pytest.mark.parametrize("transport", ["shared_memory", "rdma"])
SHORT_S = 3.0


@pytest.fixture(autouse=True)
def _transport_is_there(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    wanted = None if callspec is None else callspec.params.get("transport")
    if wanted == "torchstore" and importlib.util.find_spec("torchstore") is None:
        missing("needs TorchStore: pip install --no-deps torchstore==0.1.2 pygtrie")


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator["Fleet"]:
    from rl_bridge.services.fleet import Fleet

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    async with Fleet(tmp_path / "logs") as fleet:
        yield fleet


@EVERY_TRANSPORT
async def test_what_one_role_puts_another_gets(fleet: "Fleet", transport: str) -> None:
    from store_roles import Publisher, Reader, state_of

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport=transport)  # type: ignore[arg-type]
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    assert await reader.latest.route() is None
    for version in range(1, 6):
        size = 8 if version < 4 else 100  # the ring is made anew on the way
        await publisher.put.route(version, float(version), size)
        assert await reader.latest.route() == version
        read = await reader.get.route(version)
        for name, tensor in state_of(float(version), size=size).items():
            assert torch.equal(read[name], tensor)
    assert await store.latest() == 5
    assert torch.equal((await store.get(4))["bias"], torch.full((3,), -4.0))
    with pytest.raises(WeightsError, match="expected version 1 to have been published and kept"):
        await store.get(1)
    await publisher.close.route()
    await store.close()
    with pytest.raises(WeightsError, match="closed"):
        await store.latest()


@EVERY_TRANSPORT
async def test_shards_of_fsdp_become_shards_of_tp_and_nobody_gathers(
    fleet: "Fleet", transport: str, tmp_path: Path
) -> None:
    from monarch.actor import this_host
    from store_roles import Ranked

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport=transport)  # type: ignore[arg-type]
    trainers, generators = (this_host().spawn_procs(per_host={"ranks": ranks}) for ranks in (2, 3))
    try:
        trainer = trainers.spawn("trainer", Ranked, store, 2, str(tmp_path / "trainer"))
        generator = generators.spawn("generator", Ranked, store, 3, str(tmp_path / "generator"))
        for version in (1, 2, 3):
            assert [count for _, count in (await trainer.put.call(version)).items()] == [0, 0]
            assert [count for _, count in (await generator.check.call(version)).items()] == [0, 0, 0]
    finally:
        await generators.stop()
        await trainers.stop()


@OF_THE_PUBLISHER
async def test_a_publisher_killed_while_it_writes_and_its_successor(fleet: "Fleet", transport: str) -> None:
    from store_roles import Publisher, Reader, state_of

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport=transport, timeout_s=SHORT_S)  # type: ignore[arg-type]
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    await publisher.put.route(1, 1.0)
    await reader.get.route(1)
    with pytest.raises((ReplicaLost, RoleFailed), match="publisher"):
        await publisher.die_while_putting.route(2)
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"version 2 will not be whole: rank 0 \(process \d+\) died"):
        await store.get(2)
    with pytest.raises(WeightsError, match="version 1"):  # what it had published has gone with it
        await store.get(1)
    assert time.monotonic() - began < SHORT_S + 20
    successor = await Publisher.options(name="successor").as_actor(store)
    await successor.put.route(1, 10.0)
    assert await reader.latest.route() == 1
    assert torch.equal((await reader.get.route(1))["weight"], state_of(10.0)["weight"])
    with pytest.raises(WeightsError, match=r"there is: version 1$"):
        await store.get(2)


async def test_a_reader_killed_while_it_holds_does_not_hold_up_the_trainer(fleet: "Fleet") -> None:
    from store_roles import Publisher, Reader

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(timeout_s=SHORT_S)
    publisher = await Publisher.options(name="publisher").as_actor(store)
    readers = [await Reader.options(name=f"reader{number}").as_actor(store) for number in range(3)]
    pids = [await reader.pid.route() for reader in readers]
    for version, reader in enumerate(readers, start=1):
        await publisher.put.route(version, float(version))
        await reader.hold.route(version)
    await publisher.put.route(4, 4.0)
    with pytest.raises(WeightsError, match="the older ones are being read, by process") as caught:
        await publisher.put.route(5, 5.0)
    assert all(str(pid) in str(caught.value) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    for version in range(5, 12):
        await publisher.put.route(version, float(version))
    assert float((await store.get(11))["weight"][0, 0]) == 11.0


async def test_a_remote_reader_killed_while_it_fetches_does_not_hold_up_the_trainer(fleet: "Fleet") -> None:
    from store_roles import Publisher, Reader

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport="rdma", timeout_s=SHORT_S)
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    await publisher.put.route(1, 1.0)
    with pytest.raises((ReplicaLost, RoleFailed), match="reader"):
        await reader.die_while_fetching.route(1)
    for version in range(2, 12):
        await publisher.put.route(version, float(version))
        assert float((await store.get(version))["weight"][0, 0]) == version


@pytest.mark.filterwarnings("default:No ibverbs RDMA hardware:Warning")  # this process publishes too
async def test_what_is_leased_is_not_overwritten_and_blocks_are_reused(fleet: "Fleet") -> None:
    from store_roles import state_of

    from rl_bridge.weights import WeightStore
    from rl_bridge.weights.directory import LocalDirectory
    from rl_bridge.weights.rdma import BufferPublisher
    from rl_bridge.weights.snapshot import Snapshot

    directory = LocalDirectory()
    store = WeightStore(directory, transport="rdma", timeout_s=0.3)
    publisher = store._publisher
    assert isinstance(publisher, BufferPublisher)
    leased: list[tuple[int, Snapshot, torch.Tensor, torch.Tensor]] = []
    for version in range(1, 6):
        if version == 5:
            with pytest.raises(
                WeightsError, match=r"expected one of 4 blocks .* by reader 1, reader 2, reader 3;"
            ):
                await store.put(version, state_of(float(version)))
            break
        await store.put(version, state_of(float(version)))
        snapshot = await directory.find(version, 0)
        assert isinstance(snapshot, Snapshot)
        if version < 4:
            await directory.lease(version, snapshot.publication, f"reader {version}", 60)
            block = publisher._rings[None][version - 1].target
            leased.append((version, snapshot, block, block.clone()))
    assert len(leased) == 3
    for version, snapshot, block, before in leased:
        assert torch.equal(block, before)
        await directory.end_lease(version, snapshot.publication, f"reader {version}")
    for version in range(6, 12):
        await store.put(version, state_of(float(version)))
        assert torch.equal((await store.get(version))["weight"], state_of(float(version))["weight"])
    assert len(publisher._rings[None]) == 4
    await store.close()


async def test_a_buffer_that_is_not_given_up_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.weights import rdma

    class Stuck:
        def drop(self) -> "Stuck":
            return self

        def get(self, timeout: float | None = None) -> None:
            assert timeout == rdma.DROP_S
            raise TimeoutError

    block = rdma._Block(torch.empty(1, dtype=torch.uint8))
    block.buffers["w"] = Stuck()
    with pytest.raises(WeightsError, match="give a buffer of weights up within 30 s"):
        block.forget()
    block.forget()  # of which nothing is left


async def test_without_torchstore_its_transport_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.weights import WeightStore

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rl_bridge.weights.torch_store", raising=False)
    monkeypatch.setitem(sys.modules, "torchstore", None)
    with pytest.raises(MissingStack, match=r"pip install --no-deps torchstore==0\.1\.2 pygtrie"):
        WeightStore.create(transport="torchstore")
