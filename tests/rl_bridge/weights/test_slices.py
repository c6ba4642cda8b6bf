"""Boxes of whole tensors: how they overlap, and which of them a rank has of a DTensor."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import WeightsError
from rl_bridge.weights.slices import Box, own_shards


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] = (5, 1, 4)) -> Box:
    start = tuple(draw(st.integers(0, extent)) for extent in shape)
    return Box(
        start=start,
        shape=tuple(draw(st.integers(0, extent - s)) for s, extent in zip(start, shape, strict=True)),
    )


def indices(box: Box) -> set[tuple[int, ...]]:
    whole = torch.arange(5 * 1 * 4).view(5, 1, 4)
    return set(whole[box.within(Box.whole(whole.shape))].flatten().tolist())


@settings(max_examples=60)
@given(boxes(), boxes())
def test_an_intersection_holds_what_both_hold(one: Box, other: Box) -> None:
    common = one.intersection(other)
    assert (set() if common is None else indices(common)) == indices(one) & indices(other)
    assert common is None or common.numel == len(indices(common))
    assert common == other.intersection(one)


def test_a_scalar_is_a_box_of_one() -> None:
    scalar = Box.whole(())
    assert scalar.intersection(scalar) == scalar
    assert scalar.numel == 1
    assert torch.tensor(3.0)[scalar.within(scalar)] == 3.0


def test_of_plain_tensors_rank_0_publishes_the_whole() -> None:
    state = {"weight": torch.ones(2, 3, requires_grad=True)}
    shard = own_shards(state, rank=0)["weight"]
    assert (shard.whole, shard.box) == ((2, 3), Box.whole((2, 3)))
    assert not shard.local.requires_grad
    assert own_shards(state, rank=1) == {}


@contextmanager
def rank_of(rank: int, shape: tuple[int, ...]) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    """Be a rank of a mesh of ranks that are not there: enough to ask what is whose."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # by a trainer that was tested in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(shape).numel())
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.heavy
@pytest.mark.parametrize("rows", [1, 3, 8, 10])
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
            place = shard.box.within(Box.whole(whole.shape))
            assert torch.equal(shard.local, whole[place])
            seen[place] += 1
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.heavy
def test_what_is_no_box_is_refused() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    with rank_of(0, (2, 2)) as mesh:
        for placements, told in (
            ([_StridedShard(0, split_factor=2), Replicate()], "one box of 'weight'"),
            ([Partial(), Replicate()], "reduce it first"),
        ):
            tensor = DTensor.from_local(torch.zeros(4, 2), mesh, placements, run_check=False)
            with pytest.raises(WeightsError, match=told):
                own_shards({"weight": tensor}, rank=0)
