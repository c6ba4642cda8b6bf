"""What ranks have published in one way is cut out in any other."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import WeightsError
from rl_bridge.weights import Box, ShardSpec
from rl_bridge.weights.assembly import copied, seen, view, wanted
from rl_bridge.weights.slices import Shard
from rl_bridge.weights.snapshot import Contribution, Origin, Publication, Snapshot, layout

SHAPE = (6, 5)


def published(shards: Sequence[dict[str, Shard]]) -> tuple[Snapshot, dict[int, torch.Tensor]]:
    """A snapshot of what each rank has, and the bytes that it lies in."""
    contributions, held = [], {}
    for rank, own in enumerate(shards):
        parts, nbytes = layout(own, header=64)
        held[rank] = torch.zeros(nbytes, dtype=torch.uint8)
        for name, shard in own.items():
            view(held[rank], parts[name]).copy_(shard.local)
        origin = Origin(machine="one", pid=1, started=1, rank=rank)
        contributions.append(Contribution(origin=origin, location=None, parts=parts))
    publication = Publication(group="trainer", number=1)
    return Snapshot(key=3, publication=publication, contributions=contributions), held


def shard_of(whole: torch.Tensor, box: Box) -> Shard:
    return Shard(whole=tuple(whole.shape), box=box, local=whole[box.within(Box.whole(whole.shape))])


@st.composite
def tilings(draw: st.DrawFn) -> list[Box]:
    """Boxes that tile the whole: it is cut into rows, each of them into columns."""
    rows = sorted({0, SHAPE[0], *draw(st.lists(st.integers(1, SHAPE[0] - 1), max_size=3))})
    boxes = []
    for top, bottom in itertools.pairwise(rows):
        columns = sorted({0, SHAPE[1], *draw(st.lists(st.integers(1, SHAPE[1] - 1), max_size=2))})
        boxes += [
            Box(start=(top, left), shape=(bottom - top, right - left))
            for left, right in itertools.pairwise(columns)
        ]
    return draw(st.permutations(boxes))


@settings(max_examples=60)
@given(tilings(), tilings(), st.sampled_from([None, torch.float64]))
def test_any_tiling_is_read_in_any_other(
    ours: list[Box], theirs: list[Box], dtype: torch.dtype | None
) -> None:
    whole = torch.arange(30.0).view(SHAPE)
    snapshot, held = published([{"weight": shard_of(whole, box)} for box in ours])
    staging: dict[str, torch.Tensor] = {}
    for box in [*theirs, Box.whole(SHAPE)]:
        like = {"weight": ShardSpec(box=box, dtype=dtype)}
        expected = whole[box.within(Box.whole(SHAPE))].to(dtype or torch.float32)
        wants = wanted(snapshot, like)
        for read in (copied(wants, held, like), seen(wants, held, staging)):
            assert torch.equal(read["weight"], expected)
            assert read["weight"].dtype == expected.dtype


def test_what_lies_whole_is_not_copied() -> None:
    whole = torch.arange(30.0).view(SHAPE)
    upper, lower = Box(start=(0, 0), shape=(3, 5)), Box(start=(3, 0), shape=(3, 5))
    snapshot, held = published([{"weight": shard_of(whole, box)} for box in (upper, lower)])
    like = {"weight": ShardSpec(box=Box(start=(4, 1), shape=(2, 2)))}
    wants = wanted(snapshot, like)
    assert {rank for want in wants for rank, _ in want.sources} == {1}, "nothing is asked of the other rank"
    staging: dict[str, torch.Tensor] = {}
    read = seen(wants, held, staging)["weight"]
    assert read.untyped_storage().data_ptr() == held[1].untyped_storage().data_ptr()
    assert staging == {}


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([Box(start=(0, 0), shape=(3, 5))], 15),
        ([Box.whole(SHAPE), Box.whole(SHAPE)], 60),
    ],
)
def test_holes_and_doubles_are_refused(boxes: list[Box], covered: int) -> None:
    whole = torch.arange(30.0).view(SHAPE)
    snapshot, _ = published([{"weight": shard_of(whole, box)} for box in boxes])
    with pytest.raises(WeightsError, match=f"the 30 elements of 'weight' .* in version 3, got {covered};"):
        wanted(snapshot, None)
