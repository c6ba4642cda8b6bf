"""The store between real processes of a run, of which some are killed."""

import asyncio
import importlib.util
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from missing import missing
from module_run import finished
from namespaces import CONTROLLER_ADDRESS, inside, namespaces
from serving import eventually
from store_stage import Directory, state_of

from rl_bridge.errors import ReplicaLostError, RoleError, SnapshotOverwrittenError, WeightsError
from rl_bridge.weights import Box, WeightStore
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.snapshot import Contribution, Origin, Publication, Snapshot, StoredPart

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

SHORT_S = 3.0


@pytest.fixture(params=["shared_memory", "rdma", "torchstore"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "torchstore" and importlib.util.find_spec("torchstore") is None:
        missing("needs TorchStore: pip install --no-deps torchstore==0.1.2 pygtrie")
    return str(request.param)


@pytest.fixture
async def fleet(tmp_path: Path, importable_modules: None) -> AsyncIterator["Fleet"]:
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path / "logs") as fleet:
        yield fleet


async def test_weights_put_by_one_role_are_read_by_another(fleet: "Fleet", transport: str) -> None:
    from store_roles import Publisher, Reader

    store = WeightStore.create(transport=transport)  # type: ignore[arg-type]
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    for version in range(1, 6):
        size = 8 if version < 4 else 100  # the ring is made anew on the way
        await publisher.put.route(version, float(version), size)
        read = await reader.get.route(version)
        for name, tensor in state_of(float(version), size=size).items():
            assert torch.equal(read[name], tensor)
    assert torch.equal((await store.get(4))["bias"], torch.full((3,), -4.0))
    with pytest.raises(WeightsError, match="expected version 1 to have been published and kept"):
        await store.get(1)
    await publisher.close.route()
    await store.close()
    with pytest.raises(WeightsError, match="closed"):
        await store.get(4)


@pytest.mark.soak
def test_host_that_joins_reads_the_weights_of_the_run(tmp_path: Path, importable_modules: None) -> None:
    """Two network namespaces stand for the hosts. In a process of its own, whose transport is that between hosts."""
    script = str(Path(__file__).with_name("joined_reader.py"))
    with namespaces(1) as (controller, (host,)):
        words = [script, str(tmp_path), CONTROLLER_ADDRESS, *inside(host.namespace)]
        ran = finished(*inside(controller), sys.executable, *words, timeout_s=150)
        assert ran.returncode == 0, ran.stderr
        asyncio.run(eventually(lambda: host.pids() == []))


@pytest.mark.soak
async def test_shards_of_fsdp_become_shards_of_tp_and_nobody_gathers(
    fleet: "Fleet", transport: str, tmp_path: Path
) -> None:
    from monarch.actor import this_host
    from store_roles import Ranked

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


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shared_memory", "rdma"])
async def test_a_publisher_killed_while_it_writes_and_its_successor(fleet: "Fleet", transport: str) -> None:
    from store_roles import Publisher, Reader

    store = WeightStore.create(transport=transport, timeout_s=SHORT_S)  # type: ignore[arg-type]
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    await publisher.put.route(1, 1.0)
    await reader.get.route(1)
    with pytest.raises((ReplicaLostError, RoleError), match="publisher"):
        await publisher.die_while_putting.route(2)
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"version 2 will not be whole: rank 0 \(process \d+\) died"):
        await store.get(2)
    with pytest.raises(WeightsError, match="version 1"):  # what it had published has gone with it
        await store.get(1)
    assert time.monotonic() - began < SHORT_S + 20
    successor = await Publisher.options(name="successor").as_actor(store)
    await successor.put.route(1, 10.0)
    assert torch.equal((await reader.get.route(1))["weight"], state_of(10.0)["weight"])
    with pytest.raises(WeightsError, match=r"there is: version 1$"):
        await store.get(2)


class Volumes:
    """Stands for a volume and its client."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.broken = False
        self.late: asyncio.Event | None = None

    async def client(self) -> "Volumes":
        return self

    async def put(self, name: str, data: torch.Tensor) -> None:
        data, late, self.late = data.clone(), self.late, None
        if late is not None:
            await late.wait()
        self.held[name] = data
        if self.broken:
            raise RuntimeError("it was too slow")

    async def get(self, name: str) -> torch.Tensor:
        return self.held[name].clone()


async def test_late_data_of_a_replaced_publisher_is_never_taken_for_its_successor_s() -> None:
    directory, volumes = Directory(), Volumes()
    before, after = (
        WeightStore(directory, transport="torchstore", volumes=volumes, timeout_s=SHORT_S)  # type: ignore[arg-type]
        for _ in range(2)
    )
    volumes.late = late = asyncio.Event()
    sending = asyncio.ensure_future(before.put(5, {"w": torch.full((3,), 1.0)}))
    await eventually(lambda: volumes.late is None)  # it is on its way
    directory.caller = "second trainer"
    await after.put(5, {"w": torch.full((3,), 2.0)})
    assert (await after.get(5))["w"].tolist() == [2.0] * 3
    late.set()  # and arrives under the name that its successor has
    with pytest.raises(WeightsError, match="replaced by a newer one"):
        await sending
    with pytest.raises(SnapshotOverwrittenError):
        await after.get(5)
    await after.put(6, {"w": torch.full((3,), 3.0)})
    assert (await after.get(6))["w"].tolist() == [3.0] * 3


async def test_volume_holds_only_the_kept_versions_and_overwrites_failed_ones() -> None:
    from rl_bridge.weights.torch_store import VolumeAddress, VolumePublisher

    volumes = Volumes()
    replaced: list[object] = []

    async def publish(publisher: VolumePublisher, key: int | str) -> str:
        async with publisher.reserve(key, 0, 8) as room:
            replaced.append(room.replaces)
            address = await room.publish({})
            assert isinstance(address, VolumeAddress)
            return address.name

    first, successor = (VolumePublisher(volumes, depth=2, timeout_s=SHORT_S) for _ in range(2))  # type: ignore[arg-type]  # a part
    names = [await publish(first, version) for version in (1, 2)]
    await publish(first, "kept")
    volumes.broken = True
    with pytest.raises(WeightsError, match="cannot send version 3 to TorchStore: it was too slow"):
        await publish(first, 3)
    volumes.broken = False
    await publish(first, 4)
    await publish(first, 5)
    assert [await publish(successor, version) for version in (5, 6)] == names
    assert volumes.held.keys() == {*names, "'kept'/0/0"}
    assert replaced == [None, None, None, 1, 1, 2, None, None]


@pytest.mark.parametrize("overwritten", [True, False])
async def test_overwritten_snapshot_is_told_apart_from_a_failed_fetch(
    monkeypatch: pytest.MonkeyPatch, overwritten: bool
) -> None:
    from rl_bridge.weights import rdma

    first, second = (Publication(group="trainer", number=number) for number in (1, 2))
    origin = Origin(machine="another", pid=1, started=1, rank=0)
    part = StoredPart(full_shape=(4,), box=Box.of_shape((4,)), dtype="uint8", offset=0, nbytes=4)

    class Fetch:
        def read_remote(self, *_: object) -> None:
            pass

        async def submit(self, *, timeout: int) -> None:
            assert timeout == 9
            if overwritten:
                await directory.announce(1, second, origin, 1, None)
            raise RuntimeError("remote access error")

    monkeypatch.setattr(rdma, "RDMAAction", Fetch)
    directory = WeightDirectory()
    await directory.announce(1, first, origin, 1, None)
    address = {"w": object()}
    await directory.complete(1, first, Contribution(origin=origin, location=address, parts={"w": part}))
    snapshot = await directory.find(1, 0)
    assert isinstance(snapshot, Snapshot)
    reader = rdma.BufferReader(directory, timeout_s=9.0)
    with pytest.raises(WeightsError, match="version 1") as caught:
        await reader.hold(snapshot, {0: {"w"}}).__aenter__()
    assert isinstance(caught.value, SnapshotOverwrittenError) is overwritten
    assert ("remote access error" in str(caught.value)) is not overwritten
