"""The store among processes that are killed, and where memory is not there or not to be written."""

import asyncio
import os
import resource
import signal
from dataclasses import replace

import pytest
import torch
from store_stage import Directory, assert_same, sibling, snapshot_of, state_of

from rl_bridge.errors import WeightsError
from rl_bridge.weights import WeightStore
from rl_bridge.weights.local import SegmentReader
from rl_bridge.weights.segments import SegmentAddress, _read_start_ticks, machine_identifier, own_origin
from rl_bridge.weights.snapshot import Origin, Publication
from tests.rl_bridge.forked_child import forked_child


async def test_a_reader_that_is_killed_holds_nothing(store: WeightStore, directory: Directory) -> None:
    await store.put(1, state_of(1.0))
    snapshot = await snapshot_of(directory, 1)
    address = snapshot.contributions[0].location
    assert isinstance(address, SegmentAddress)

    def hold() -> object:
        lease = SegmentReader().attach(1, snapshot.contributions[0].origin, address)
        lease.__enter__()
        return lease

    segment = store._publisher._rings[None].segments[0]
    with forked_child(hold) as pid:
        assert segment.readers() == [pid]
        assert not segment.lock()
        for version in range(2, 10):
            await store.put(version, state_of(float(version)))
        assert segment.generation == address.generation
    assert segment.readers() == []
    for version in range(10, 13):
        await store.put(version, state_of(float(version)))
    assert segment.generation != address.generation, "it is used again"


async def test_publisher_killed_while_writing_is_reported_to_waiting_readers(
    store: WeightStore, directory: Directory
) -> None:
    await store.put(1, state_of(1.0))
    with forked_child(lambda: True) as pid:
        ticks = _read_start_ticks(pid)
        assert ticks is not None
        origin = Origin(machine=machine_identifier(), pid=pid, started=ticks, rank=0)
        await directory.announce(2, Publication(group="first trainer", number=2), origin, 1, None)
        patient = sibling(store, directory)
        patient._timeout_s = 30.0
        waiting = asyncio.ensure_future(patient.get(2))
        await asyncio.sleep(0.1)
        assert not waiting.done()
    with pytest.raises(WeightsError, match=rf"rank 0 \(process {pid}\) died while it published"):
        await waiting
    await store.put(2, state_of(2.0))
    assert_same(await store.get(2), state_of(2.0))


async def test_reused_pid_is_not_taken_for_the_dead_publisher(
    store: WeightStore, directory: Directory
) -> None:
    dead = replace(own_origin(0), started=0)
    await directory.announce(1, Publication(group="trainer", number=1), dead, 1, None)
    with pytest.raises(WeightsError, match="died while it published"):
        await store.get(1)


async def test_snapshots_of_a_killed_publisher_are_gone_and_the_error_says_so(
    store: WeightStore, directory: Directory
) -> None:
    await store.put(1, state_of(1.0))
    (own,) = (await snapshot_of(directory, 1)).contributions
    with forked_child(lambda: True) as pid:
        ticks = _read_start_ticks(pid)
        assert ticks is not None
    for origin, why in (
        (
            replace(own.origin, pid=pid, started=ticks),
            f"process {pid}, No such file or directory.: did it die",
        ),
        (replace(own.origin, pid=pid, machine="another"), "on another machine, which the transport 'rdma'"),
    ):
        directory._entries[1].finished[0] = replace(own, origin=origin)
        with pytest.raises(WeightsError, match=why):
            await store.get(1)


async def test_memory_that_is_not_there_is_an_error_and_older_snapshots_stay(store: WeightStore) -> None:
    await store.put(1, state_of(1.0))
    huge = {"weight": torch.empty(1).expand(1 << 50)}
    with pytest.raises(WeightsError, match=r"cannot reserve 45.* bytes of shared memory: .* are available"):
        await store.put(2, huge)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(WeightsError, match=r"cannot reserve .* File too large"):
            await store.put(3, state_of(3.0, size=1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(await store.get(1), state_of(1.0))
    await store.put(4, state_of(4.0))
    assert_same(await store.get(4), state_of(4.0))


async def test_writing_to_a_snapshot_ends_the_process_that_tries(
    store: WeightStore, directory: Directory
) -> None:
    await store.put(1, state_of(1.0))
    async with store.open(1) as state:
        if (pid := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            state["weight"][0, 0] = 2.0
            os._exit(0)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 - it ends at once
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert_same(await store.get(1), state_of(1.0))
