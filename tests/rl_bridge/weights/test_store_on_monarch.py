"""The store between real processes of a run, of which some are killed."""

import importlib.util
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from missing import missing

from rl_bridge.errors import ReplicaLostError, RoleError, SnapshotOverwrittenError, WeightsError

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
EVERY_TRANSPORT = pytest.mark.parametrize("transport", ["shared_memory", "rdma", "torchstore"])
OF_THE_PUBLISHER = pytest.mark.parametrize("transport", ["shared_memory", "rdma"])
IN_A_VOLUME = pytest.mark.parametrize("transport", ["torchstore"])
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


@pytest.mark.soak
@OF_THE_PUBLISHER
async def test_a_publisher_killed_while_it_writes_and_its_successor(fleet: "Fleet", transport: str) -> None:
    from store_roles import Publisher, Reader, state_of

    from rl_bridge.weights import WeightStore

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


@IN_A_VOLUME
async def test_what_failed_half_way_is_deleted_from_the_volume_by_the_next(transport: str) -> None:
    from rl_bridge.weights.snapshot import Publication
    from rl_bridge.weights.torch_store import VolumePublisher

    others = {"None/new/1/1/ab", "'kept'/old/kept/1/ab", "'None'/old/None/1/ab"}

    class Volumes:
        """Fails in what the test says: a put when it has been done, a delete before."""

        def __init__(self) -> None:
            self.held = dict.fromkeys([*others, "None/old/7/1/ab", "None/old/8/2/ab"], torch.zeros(1))
            self.broken: str | None = None

        async def client(self) -> "Volumes":
            return self

        async def names(self) -> list[str]:
            return list(self.held)

        async def put(self, name: str, data: torch.Tensor) -> None:
            self.held[name] = data
            self.fail("put")

        async def delete(self, name: str) -> None:
            self.fail("delete")
            self.held.pop(name, None)

        def fail(self, what: str) -> None:
            if self.broken == what:
                raise RuntimeError(f"{what} was too slow")

    volumes = Volumes()
    publisher = VolumePublisher(volumes, depth=2, timeout_s=SHORT_S)  # type: ignore[arg-type]

    async def publish(version: int, *, broken: str | None = None) -> None:
        volumes.broken = broken
        async with publisher.reserve(version, Publication(group="new", number=version), 8) as room:
            await room.publish({})

    def own() -> list[int]:
        """The versions that are there, beside what nobody but its own publisher may delete."""
        assert volumes.held.keys() >= others
        return [int(name.split("/")[-3]) for name in volumes.held if name not in others]

    with pytest.raises(WeightsError, match="delete was too slow"):
        await publish(1, broken="delete")
    assert own() == [7, 8]
    await publish(1)
    assert own() == [1]
    await publish(2)
    with pytest.raises(WeightsError, match="put was too slow"):
        await publish(3, broken="put")
    assert own() == [2, 3]
    await publish(4)
    assert own() == [2, 4]
    with pytest.raises(WeightsError, match="delete was too slow"):
        await publish(5, broken="delete")
    assert own() == [2, 4]
    await publish(6)
    assert own() == [4, 6]
    await publish(7)
    assert own() == [6, 7]


async def test_a_remote_reader_killed_while_it_fetches_does_not_hold_up_the_trainer(fleet: "Fleet") -> None:
    from store_roles import Publisher, Reader

    from rl_bridge.weights import WeightStore

    store = WeightStore.create(transport="rdma", timeout_s=SHORT_S)
    publisher = await Publisher.options(name="publisher").as_actor(store)
    reader = await Reader.options(name="reader").as_actor(store)
    await publisher.put.route(1, 1.0)
    with pytest.raises((ReplicaLostError, RoleError), match="reader"):
        await reader.die_while_fetching.route(1)
    for version in range(2, 12):
        await publisher.put.route(version, float(version))
        assert float((await store.get(version))["weight"][0, 0]) == version


@pytest.mark.filterwarnings("default:No ibverbs RDMA hardware:Warning")  # this process publishes too
async def test_what_is_leased_is_not_overwritten_and_blocks_are_reused(fleet: "Fleet") -> None:
    from store_roles import state_of

    from rl_bridge.weights import WeightStore
    from rl_bridge.weights.directory import WeightDirectory
    from rl_bridge.weights.rdma import BufferPublisher
    from rl_bridge.weights.snapshot import Snapshot

    directory = WeightDirectory()
    store = WeightStore(directory, transport="rdma", timeout_s=0.3)
    publisher = store._publisher
    assert isinstance(publisher, BufferPublisher)
    leased: list[tuple[int, Snapshot, torch.Tensor, torch.Tensor]] = []
    for version in range(1, 6):
        if version == 5:
            with pytest.raises(
                WeightsError, match=r"expected one of 4 segments .* by reader 1, reader 2, reader 3;"
            ):
                await store.put(version, state_of(float(version)))
            break
        await store.put(version, state_of(float(version)))
        snapshot = await directory.find(version, 0)
        assert isinstance(snapshot, Snapshot)
        if version < 4:
            await directory.lease(version, snapshot.publication, f"reader {version}", 60)
            (segment,) = [
                one for one in publisher._rings[None].segments if one.holds == (version, snapshot.publication)
            ]
            block = torch.frombuffer(segment.map, dtype=torch.uint8)
            leased.append((version, snapshot, block, block.clone()))
    assert len(leased) == 3
    while leased:
        version, snapshot, block, before = leased.pop()
        assert torch.equal(block, before)
        del block  # a mapping that is looked at cannot be closed
        await directory.end_lease(version, snapshot.publication, f"reader {version}")
    for version in range(6, 12):
        await store.put(version, state_of(float(version)))
        assert torch.equal((await store.get(version))["weight"], state_of(float(version))["weight"])
    assert len(publisher._rings[None].segments) == 4
    await store.close()


@pytest.mark.parametrize("overwritten", [True, False])
async def test_what_was_overwritten_under_a_fetch_is_told_from_a_fetch_that_failed(
    monkeypatch: pytest.MonkeyPatch, overwritten: bool
) -> None:
    from rl_bridge.weights import Box, rdma
    from rl_bridge.weights.directory import WeightDirectory
    from rl_bridge.weights.snapshot import Contribution, Origin, Publication, Snapshot, StoredPart

    first, second = (Publication(group="trainer", number=number) for number in (1, 2))
    origin = Origin(machine="another", pid=1, started=1, rank=0)
    part = StoredPart(whole=(4,), box=Box.whole((4,)), dtype="uint8", offset=0, nbytes=4)

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
    assert await directory.retire(1, first) == []
