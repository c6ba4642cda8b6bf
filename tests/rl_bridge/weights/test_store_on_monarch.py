"""The store between real processes of a run, of which some are killed."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from module_run import finished
from namespaces import CONTROLLER_ADDRESS, inside, namespaces
from serving import eventually
from store_stage import state_of

from rl_bridge.errors import ReplicaLostError, RoleError, SnapshotOverwrittenError, WeightsError
from rl_bridge.weights import Box, WeightStore
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.snapshot import Contribution, Origin, Publication, Snapshot, StoredPart

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

SHORT_S = 3.0


@pytest.fixture(params=["shared_memory", "rdma"])
def transport(request: pytest.FixtureRequest) -> str:
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
