"""Boxes of whole tensors: which a rank has, how any tiling is read in any other, and how they are copied."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import WeightsError
from rl_bridge.titan.architecture import fsdp_parts_match_dtensors
from rl_bridge.weights import ShardSpec
from rl_bridge.weights.assembly import SnapshotState, plan_reads, view
from rl_bridge.weights.snapshot import (
    Box,
    Contribution,
    Origin,
    Publication,
    Snapshot,
    dtensor_box,
    layout,
    own_shards,
)
from rl_bridge.weights.snapshot import Shard as OwnShard


@contextmanager
def rank_of(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = None
) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    """Be a rank of a mesh of ranks that are not there: enough to ask what is whose."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # by a trainer that was tested in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize(
    "kind", ["fsdp", "tp rows", "tp columns", "fsdp over tp", "replicas of shards", "replicas"]
)
def test_the_shards_of_all_ranks_tile_the_tensor(kind: str, rows: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    shape, placements = {
        "fsdp": ((4,), [Shard(0)]),
        "tp rows": ((3,), [Shard(0)]),
        "tp columns": ((3,), [Shard(1)]),
        "fsdp over tp": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        "replicas of shards": ((2, 2), [Replicate(), Shard(1)]),
        "replicas": ((4,), [Replicate()]),
    }[kind]
    whole = torch.arange(rows * 6).view(rows, 6)
    seen = torch.zeros_like(whole)
    for rank in range(torch.Size(shape).numel()):
        with rank_of(rank, shape) as mesh:
            # What each rank has is cut out by torch itself, whatever the mesh.
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert isinstance(tensor, DTensor)
            shard = own_shards({"weight": tensor}, rank=rank).get("weight")
        if shard is not None:
            place = shard.box.index_in(Box.of_shape(whole.shape))
            assert torch.equal(shard.local, whole[place])
            seen[place] += 1
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("rows", "fsdp", "tp", "described"),
    [
        (32, 4, 2, True),
        (33, 2, 2, True),
        (35, 4, 2, True),
        (33, 4, 2, False),
        (63, 4, 4, True),
        (35, 4, 4, False),
        (37, 3, 2, False),
    ],
)
def test_layouts_are_refused_whose_parts_dtensors_do_not_describe(
    rows: int, fsdp: int, tp: int, described: bool
) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    wrong = 0
    for rank in range(fsdp * tp):
        with rank_of(rank, (fsdp, tp), ("fsdp", "tp")) as mesh:
            layer = torch.nn.Linear(2, rows, bias=False)
            whole = torch.arange(rows * 2.0).view(rows, 2)
            weight = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
            layer.weight = torch.nn.Parameter(weight)
            fully_shard(layer, mesh=mesh["fsdp"])
            assert isinstance(layer.weight, DTensor)
            local = layer.weight.to_local().detach()
            # On its own mesh, which is joined from two, a rank that is not there has no coordinate.
            tensor = DTensor.from_local(
                local,
                mesh,
                layer.weight.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            box = dtensor_box(tensor)
            place = box.index_in(Box.of_shape(whole.shape))
            wrong += tuple(local.shape) != box.shape or not torch.equal(local, whole[place])
    assert bool(wrong) is not described
    assert fsdp_parts_match_dtensors(rows, tp, fsdp) is described


@pytest.mark.heavy
def test_layouts_that_are_no_box_are_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    with rank_of(0, (2, 2)) as mesh:
        for placements, message in (
            ([_StridedShard(0, split_factor=2), Replicate()], "one box of 'weight'"),
            ([Partial(), Replicate()], "reduce it first"),
        ):
            tensor = DTensor.from_local(torch.zeros(4, 2), mesh, placements, run_check=False)
            with pytest.raises(WeightsError, match=message):
                own_shards({"weight": tensor}, rank=0)


SHAPE = (6, 5)


def publish(shards: Sequence[dict[str, OwnShard]]) -> tuple[Snapshot, dict[int, torch.Tensor]]:
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


def shard_of(whole: torch.Tensor, box: Box) -> OwnShard:
    return OwnShard(
        full_shape=tuple(whole.shape), box=box, local=whole[box.index_in(Box.of_shape(whole.shape))]
    )


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


@settings(max_examples=30)
@given(tilings(), tilings(), st.sampled_from([None, torch.float64]))
def test_any_tiling_is_read_in_any_other(
    ours: list[Box], theirs: list[Box], dtype: torch.dtype | None
) -> None:
    whole = torch.arange(30.0).view(SHAPE)
    snapshot, held = publish([{"weight": shard_of(whole, box)} for box in ours])
    for box in [*theirs, Box.of_shape(SHAPE)]:
        like = {"weight": ShardSpec(box=box, dtype=dtype)}
        expected = whole[box.index_in(Box.of_shape(SHAPE))].to(dtype or torch.float32)
        wants = plan_reads(snapshot, like)
        for copy in (True, False):
            state = SnapshotState(wants, held, like, copy=copy)
            assert torch.equal(state["weight"], expected)
            described = state.without_data()["weight"]
            assert (described.shape, described.dtype) == (expected.shape, expected.dtype)
            assert state["weight"].dtype == expected.dtype


def test_contiguous_whole_tensor_is_not_copied() -> None:
    whole = torch.arange(30.0).view(SHAPE)
    upper, lower = Box(start=(0, 0), shape=(3, 5)), Box(start=(3, 0), shape=(3, 5))
    snapshot, held = publish([{"weight": shard_of(whole, box)} for box in (upper, lower)])
    like = {"weight": ShardSpec(box=Box(start=(4, 1), shape=(2, 2)))}
    wants = plan_reads(snapshot, like)
    assert {rank for want in wants for rank, _ in want.sources} == {1}, "nothing is asked of the other rank"
    read = SnapshotState(wants, held, like)["weight"]
    assert read.untyped_storage().data_ptr() == held[1].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [([Box(start=(0, 0), shape=(3, 5))], 15), ([Box.of_shape(SHAPE), Box.of_shape(SHAPE)], 60)],
)
def test_holes_and_doubles_are_refused(boxes: list[Box], covered: int) -> None:
    whole = torch.arange(30.0).view(SHAPE)
    snapshot, _ = publish([{"weight": shard_of(whole, box)} for box in boxes])
    with pytest.raises(WeightsError, match=f"the 30 elements of 'weight' .* in version 3, got {covered};"):
        plan_reads(snapshot, None)
