"""The store's promises: snapshots are whole, immutable while they are held, and replaced in order."""

import asyncio
import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from store_stage import Directory, assert_same, sibling, snapshot_of, state_of

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights import Box, ShardSpec, WeightStore
from rl_bridge.weights import store as store_module
from rl_bridge.weights.local import SegmentReader
from rl_bridge.weights.segments import EXTRA_SEGMENTS, SegmentAddress
from rl_bridge.weights.snapshot import LazySum

VARIETY = {
    "float32": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bfloat16": torch.tensor([1.5, -2.0, 1e-8], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**62), 7]),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "zero rows": torch.zeros(0, 7),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 4),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


async def test_everything_comes_back_as_it_was(store: WeightStore) -> None:
    await store.put("variety", VARIETY)
    copy = await store.get("variety")
    assert_same(copy, VARIETY)
    async with store.open("variety") as state:
        assert_same(state, VARIETY)
    copy["float32"].zero_()  # it belongs to the caller
    assert_same(await store.get("variety"), VARIETY)
    weights = state_of(1.0)
    await store.put(1, weights)
    weights["weight"].mul_(100)  # a snapshot does not follow the weights
    assert_same(await store.get(1), state_of(1.0))


async def test_a_sum_is_published_in_the_dtype_asked_for_and_its_parts_stay_as_they_are(
    store: WeightStore, directory: Directory
) -> None:
    """A bfloat16 model's weights take half of what its float32 master weights would; counts stay whole."""
    base, added = torch.ones(4, 2), torch.arange(8.0).reshape(4, 2)
    steps, bias = torch.tensor([2**40]), torch.rand(3)
    asked: list[Box] = []

    def part(box: Box) -> torch.Tensor:
        asked.append(box)
        return added[box.index_in(Box.of_shape(added.shape))]

    state = {"steps": steps, "bias": bias, "weight": LazySum(base=base, added=part)}
    await store.put(1, state, dtype=torch.bfloat16)
    assert asked == [Box.of_shape((4, 2))]
    expected = {"steps": steps, "bias": bias.bfloat16(), "weight": (added + 1.0).bfloat16()}
    assert_same(await store.get(1), expected)
    assert torch.equal(base, torch.ones(4, 2))
    (contribution,) = (await snapshot_of(directory, 1)).contributions
    assert contribution.parts["weight"].nbytes == 8 * 2


async def test_as_many_versions_stay_as_the_store_is_deep_and_names_stay_beside_them(
    store: WeightStore,
) -> None:
    await store.put("reference", state_of(100.0))
    for version in range(1, 5):
        await store.put(version, state_of(float(version)))
    for version in (3, 4):
        assert_same(await store.get(version), state_of(float(version)))
    assert_same(await store.get("reference"), state_of(100.0))
    for gone in (1, 2, 5, "refrence"):
        with pytest.raises(WeightsError, match="kept; there is: 'reference', version 3, version 4"):
            await store.get(gone)


async def test_a_version_published_once_more_replaces_it_and_all_later_ones(store: WeightStore) -> None:
    for version in (1, 2, 3):
        await store.put(version, state_of(float(version)))
    async with store.open(3) as held:
        await store.put(2, state_of(20.0))  # the run went back
        assert_same(held, state_of(3.0))
    assert_same(await store.get(2), state_of(20.0))
    with pytest.raises(WeightsError, match=r"there is: version 2$"):
        await store.get(3)


async def test_overwritten_snapshot_is_detected_after_an_unannounced_put(
    store: WeightStore, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        await store.put(version, state_of(float(version)))
    snapshot = await snapshot_of(directory, 1)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "announce", AsyncMock(side_effect=WeightsError("the directory is busy")))
        with pytest.raises(WeightsError, match="busy"):
            await store.put(3, state_of(3.0))
    await store.put(3, state_of(3.0))  # to where version 1 was
    assert not await directory.is_current(1, snapshot.publication)


async def test_held_snapshot_is_never_overwritten_and_the_ring_is_bounded(
    store: WeightStore,
) -> None:
    await store.put(1, state_of(1.0))
    async with store.open(1) as first:
        for version in range(2, 50):
            await store.put(version, state_of(float(version)))
        assert_same(first, state_of(1.0))
        assert len(store._publisher._rings[None].segments) == 3
        async with store.open(49) as second:
            await store.put(50, state_of(50.0))
            async with store.open(50) as third:
                await store.put(51, state_of(51.0))
                async with store.open(51):
                    with pytest.raises(WeightsError, match=f"being read, by process {os.getpid()};"):
                        await store.put(52, state_of(52.0))
                    store._publisher._timeout_s = 60.0
                    waiting = asyncio.ensure_future(store.put(53, state_of(53.0)))
                    await asyncio.sleep(0.05)
                    assert not waiting.done()
                    for held, value in ((first, 1.0), (second, 49.0), (third, 50.0)):
                        assert_same(held, state_of(value))
            await waiting
    assert_same(await store.get(53), state_of(53.0))
    assert len(store._publisher._rings[None].segments) == 2 + EXTRA_SEGMENTS


async def test_a_larger_state_gets_larger_segments_and_old_ones_are_let_go_of(store: WeightStore) -> None:
    others = segments()  # of tests before, whose stores nobody has collected yet
    for version in range(1, 9):
        await store.put(version, state_of(float(version), size=100 * version))
        assert_same(await store.get(version), state_of(float(version), size=100 * version))
        with pytest.raises(WeightsError, match=f"expected version {version - 2} to have been"):
            await store.get(version - 2)
    gc.collect()
    assert len(segments() - others) == 2


def segments() -> set[int]:
    """The segments that this process has open."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread of a library has closed it meanwhile
            if "ropewalk-weights" in os.readlink(link):
                inodes.add(link.stat().st_ino)
    return inodes


async def test_a_store_closed_under_a_reader_takes_nothing_from_it_and_gives_its_memory_back(
    store: WeightStore, directory: Directory
) -> None:
    gc.collect()
    others, descriptors = segments(), len(os.listdir("/proc/self/fd"))
    reader = sibling(store, directory)
    await store.put(1, state_of(1.0))
    async with reader.open(1) as state:
        await store.close()
        await reader.close()
        assert_same(state, state_of(1.0))
    for refused in (store.put(2, state_of(2.0)), reader.get(1)):
        with pytest.raises(WeightsError, match="closed"):
            await refused
    del state
    gc.collect()
    # A thread may not have dropped what it copied yet, and others may still be closing theirs.
    async with asyncio.timeout(60):
        while not segments() <= others or len(os.listdir("/proc/self/fd")) > descriptors:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_two_ranks_make_a_snapshot_whole_and_nobody_sees_half(
    store: WeightStore, directory: Directory
) -> None:
    other = sibling(store, directory)
    await store.put(1, state_of(1.0), rank=0, ranks=2)
    with pytest.raises(WeightsError, match=r"within 0.3 s, still missing are ranks \[1\]"):
        await store.get(1)
    store._timeout_s = 60.0
    waiting = asyncio.ensure_future(store.get(1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await other.put(1, state_of(1.0), rank=1, ranks=2)
    assert_same(await waiting, state_of(1.0))
    await store.put(2, state_of(1.0), rank=0, ranks=2)
    with pytest.raises(WeightsError, match="expected 2 ranks"):
        await other.put(2, state_of(1.0), rank=1, ranks=3)
    await other.close()


async def test_ranks_of_two_lives_of_the_trainer_never_make_one_snapshot(
    store: WeightStore, directory: Directory
) -> None:
    old, new = [store, sibling(store, directory)], [sibling(store, directory), sibling(store, directory)]
    await store.put(6, state_of(6.0))
    await old[0].put(7, state_of(1.0), rank=0, ranks=2)
    # It died there, and was started anew; now rank 1 is the first.
    directory.caller = "second trainer"
    await new[1].put(7, state_of(2.0), rank=1, ranks=2)
    with pytest.raises(WeightsError, match=r"missing are ranks \[0\]"):
        await store.get(7)
    # What the old one had still on its way is not heard any more.
    directory.caller = "first trainer"
    with pytest.raises(WeightsError, match="replaced by a newer one"):
        await old[1].put(7, state_of(1.0), rank=1, ranks=2)
    directory.caller = "second trainer"
    await new[0].put(7, state_of(2.0), rank=0, ranks=2)
    assert_same(await store.get(7), state_of(2.0))
    with pytest.raises(
        WeightsError, match=r"there is: version 7$"
    ):  # what the dead one had published has gone
        await store.get(6)
    for one in (old[1], *new):
        await one.close()


async def test_failed_put_of_a_rank_is_reported_to_waiting_readers(
    store: WeightStore, directory: Directory
) -> None:
    store._timeout_s = 20.0
    other = sibling(store, directory)
    for version in (1, 2):
        await store.put(version, state_of(float(version)))
    await other.put(3, state_of(3.0), rank=1, ranks=2)
    waiting = asyncio.ensure_future(store.get(3))
    await asyncio.sleep(0.02)
    store._put_counts[None] = 0  # as on the other's first time
    broken = {**state_of(3.0), "further": torch.empty(8, device="meta")}
    with pytest.raises(Exception, match="meta"):
        await store.put(3, broken, rank=0, ranks=2)
    with pytest.raises(WeightsError, match=r"rank 0 could not publish it: .*meta"):
        await waiting
    # What was there is there still, and the next one works.
    assert_same(await store.get(2), state_of(2.0))
    await store.put(4, state_of(4.0))
    for version in (2, 4):
        assert_same(await store.get(version), state_of(float(version)))
    await other.close()


async def test_parts_and_other_types_are_cut_out(store: WeightStore) -> None:
    whole = {"weight": torch.arange(20.0).view(5, 4), "bias": torch.arange(3.0)}
    await store.put(1, whole)
    await store.put(2, {"bias": torch.ones(3)})
    box = Box(start=(1, 2), shape=(3, 2))
    like = {"weight": ShardSpec(box=box, dtype=torch.bfloat16), "bias": torch.empty(3, dtype=torch.float64)}
    expected = {"weight": whole["weight"][1:4, 2:].bfloat16(), "bias": whole["bias"].double()}
    assert_same(await store.get(1, like), expected)
    async with store.open(1, like) as state, store.open(2, {"bias": like["bias"]}) as other:
        assert other["bias"].tolist() == [1.0] * 3
        assert_same(state, expected)  # of memory of its own
    async with store.open(1, {"weight": ShardSpec(box=box)}) as state:
        assert_same(state, {"weight": whole["weight"][1:4, 2:]})
    for wrong, message in (
        ({"weights": torch.empty(5, 4)}, "expected 'weights' in version 1"),
        ({"weight": torch.empty(4, 5)}, r"within \(5, 4\), its shape in version 1, got \(4, 5\)"),
        ({"weight": ShardSpec(box=Box(start=(3, 0), shape=(3, 4)))}, r"got \(3, 4\) from \(3, 0\)"),
    ):
        with pytest.raises(WeightsError, match=message):
            await store.get(1, wrong)


async def test_a_put_that_is_cancelled_waits_for_its_thread_and_leaves_the_store_in_order(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(1, state_of(1.0))
    packing, go_on = threading.Event(), threading.Event()

    def slowly(*_: object) -> None:
        packing.set()
        go_on.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_pack", slowly)
        putting = asyncio.ensure_future(store.put(2, state_of(2.0)))
        await asyncio.to_thread(packing.wait, 60)
        putting.cancel()
        await asyncio.sleep(0.05)
        assert not putting.done(), "the thread still writes into the segment"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
    with pytest.raises(WeightsError, match="rank 0 could not publish it: CancelledError"):
        await store.get(2)
    for version in (2, 3, 4):
        await store.put(version, state_of(float(version)))
        assert_same(await store.get(version), state_of(float(version)))


async def test_reader_with_an_outdated_address_gets_nothing(store: WeightStore, directory: Directory) -> None:
    await store.put(1, state_of(1.0))
    (old,) = (await snapshot_of(directory, 1)).contributions
    assert isinstance(old.location, SegmentAddress)
    reader, address = SegmentReader(), old.location

    def assert_refused() -> None:
        with (
            pytest.raises(SnapshotOverwrittenError, match="version 1"),
            reader.attach(1, old.origin, address),
        ):
            raise AssertionError

    with reader.attach(1, old.origin, address):
        pass
    await store.put(2, state_of(2.0))
    with pytest.raises(Exception, match="meta"):  # half written over the first
        await store.put(3, {**state_of(3.0), "bias": torch.empty(3, device="meta")})
    for version in (3, 4):
        assert_refused()
        await store.put(version, state_of(float(version)))
    # And what it tried to hold is not held.
    assert store._publisher._rings[None].segments[0].readers() == []
    for version in (5, 6):
        await store.put(version, state_of(4.0, size=1000))  # its segment is given up
    assert_refused()
    await reader.close()
