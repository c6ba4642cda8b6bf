"""Snapshots, independent of transport: which rank published which part of each tensor."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Box:
    """A box of indices within a whole tensor: the first index and the extent, one a dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box of the whole tensor."""
        return cls(start=(0,) * len(shape), shape=tuple(shape))

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes; None where it is empty."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(
            min(a + n, b + m) - s
            for a, n, b, m, s in zip(self.start, self.shape, other.start, other.shape, start, strict=True)
        )
        return Box(start=start, shape=shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Index a tensor that holds `outer` with this, and get what this box holds."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True)
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardSpec:
    """What a reader without a device mesh asks for: a part of the whole tensor; dtype None leaves it as published."""

    box: Box
    dtype: torch.dtype | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class LazySum:
    """A tensor and what `added` gives for a box of it, summed as it is copied: one sum at a time takes memory."""

    base: Tensor
    added: Callable[[Box], Tensor]


State: TypeAlias = Mapping[str, Tensor | LazySum]
"""What can be published: tensors by their names."""
Like: TypeAlias = Mapping[str, Tensor | ShardSpec]
"""The names wanted, each in the sharding of a DTensor, the part of a `ShardSpec`, or whole (a plain tensor)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shard:
    """What one rank has of one tensor, detached, within a tensor of the shape `whole`.

    And what is to be added to it.
    """

    whole: tuple[int, ...]
    box: Box
    local: Tensor
    added: Callable[[Box], Tensor] | None = None

    def values(self) -> Tensor:
        """What is published: `local`, or a new tensor with what is added."""
        return self.local if self.added is None else self.local + self.added(self.box)


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Does not import what only those who have one need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_shards(state: State, *, rank: int) -> dict[str, Shard]:
    """What this rank has to publish of a state dict; names of which it has nothing are left out.

    Of values that several ranks hold alike, one publishes: of a plain tensor rank 0, of a DTensor the first along every
    dimension of its mesh that it is replicated over. Nothing is gathered. WeightsError for a sum that has yet to be
    reduced, or a part that is no box.
    """
    shards: dict[str, Shard] = {}
    for name, value in state.items():
        tensor = value.base if isinstance(value, LazySum) else value
        shard: Shard | None = None
        if is_dtensor(tensor):
            shard = _dtensor_shard(name, tensor)
        elif not rank:
            shard = Shard(whole=tuple(tensor.shape), box=Box.whole(tensor.shape), local=tensor.detach())
        if shard is not None:
            shards[name] = replace(shard, added=value.added) if isinstance(value, LazySum) else shard
    return shards


def _dtensor_shard(name: str, tensor: "DTensor") -> Shard | None:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None  # this rank is outside of the tensor's mesh
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_partial():
            raise WeightsError(
                f"expected {name!r} to be sharded or replicated, got {placement}; reduce it first"
            )
        if placement.is_replicate() and place:
            return None
    _require_contiguous(name, tensor)
    box = dtensor_box(tensor)
    if not box.numel and any(coordinate):
        return None  # of a tensor without elements the first rank tells that it exists
    return Shard(whole=tuple(tensor.shape), box=box, local=tensor.to_local().detach())


def _require_contiguous(name: str, tensor: "DTensor") -> None:
    """FSDP over TP shards a shard: that is a box only while the tensor is sharded over both."""
    for at, placement in enumerate(tensor.placements):
        split, dim = getattr(placement, "split_factor", None), getattr(placement, "dim", None)
        if split is None:
            continue
        later = range(at + 1, len(tensor.placements))
        inner = [tensor.device_mesh.size(n) for n in later if tensor.placements[n].is_shard(dim)]
        if split != math.prod(inner):
            raise WeightsError(
                f"expected every rank to have one box of {name!r}, got {tensor.placements}, by which a rank has "
                "several; publish it in the sharding that it is trained in"
            )


def dtensor_box(tensor: "DTensor") -> Box:
    """The part of a DTensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(start=tuple(start), shape=tuple(shape))


ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes: a cache line."""

Key: TypeAlias = PolicyVersion | str
"""What a snapshot is called: a version of the policy, or a name of one's own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredPart:
    """Where one rank's part of one tensor lies in its segment, in bytes; `dtype` is the name within torch."""

    whole: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Publication:
    """The identity of one publication of a key, the same on every rank.

    Attributes:
        number: How often this group has published the key, this time included.
    """

    group: str
    number: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Origin:
    """The process that publishes.

    Attributes:
        machine: Where its number means something.
        started: When it was started, as in /proc, so that a number that is used again is told apart.
    """

    machine: str
    pid: int
    started: int
    rank: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Contribution:
    """The part of a snapshot that one rank has published, with its layout. Small and picklable, as all of this module.

    Attributes:
        location: Where its segment is; the transport knows what to make of it. None where the rank had nothing.
    """

    origin: Origin
    location: object
    parts: Mapping[str, StoredPart]


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """A snapshot that every rank has published its part of, one a rank, in their order."""

    key: Key
    publication: Publication
    contributions: Sequence[Contribution]

    def parts(self) -> dict[str, list[tuple[int, StoredPart]]]:
        """The parts of each tensor, each with the rank that published it."""
        parts: dict[str, list[tuple[int, StoredPart]]] = {}
        for rank, contribution in enumerate(self.contributions):
            for name, part in contribution.parts.items():
                parts.setdefault(name, []).append((rank, part))
        return parts


def key_text(key: Key) -> str:
    """A key as messages name it."""
    return repr(key) if isinstance(key, str) else f"version {key}"


def align(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def layout(
    shards: Mapping[str, Shard], *, header: int, dtype: torch.dtype | None = None
) -> tuple[dict[str, StoredPart], int]:
    """Lay shards out one after another, behind a header; returns what lies where, and how many bytes that takes."""
    parts: dict[str, StoredPart] = {}
    offset = header
    for name, shard in shards.items():
        kind = dtype if dtype is not None and shard.local.is_floating_point() else shard.local.dtype
        nbytes = shard.local.numel() * kind.itemsize
        parts[name] = StoredPart(
            whole=shard.whole,
            box=shard.box,
            dtype=str(kind).removeprefix("torch."),
            offset=offset,
            nbytes=nbytes,
        )
        offset = align(offset + nbytes)
    return parts, offset
