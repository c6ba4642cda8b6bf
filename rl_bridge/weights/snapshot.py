"""Snapshots, independent of the transport: the part of each tensor that each rank published."""

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
    """A box of indices within a whole tensor: the first index and the extent in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Self:
        """Return the box of the whole tensor."""
        return cls(start=(0,) * len(shape), shape=tuple(shape))

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(
            min(a + n, b + m) - s
            for a, n, b, m, s in zip(self.start, self.shape, other.start, other.shape, start, strict=True)
        )
        return Box(start=start, shape=shape) if all(extent > 0 for extent in shape) else None

    def index_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the index of this box's elements in a tensor that holds `outer`."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True)
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardSpec:
    """A part of a tensor, for readers without a device mesh; a dtype of None keeps the published one."""

    box: Box
    dtype: torch.dtype | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class LazySum:
    """The sum of a tensor and `added` of a box of it, computed when it is copied, so that one sum at a time is held."""

    base: Tensor
    added: Callable[[Box], Tensor]

    def numel(self) -> int:
        """The number of elements."""
        return self.base.numel()


@dataclass(kw_only=True, slots=True, frozen=True)
class StackItem:
    """One tensor of a stack of them, along the first dimension, that is sharded as a whole: an expert of a layer."""

    stack: Tensor
    index: int

    def numel(self) -> int:
        """The number of elements of this one."""
        return self.stack.numel() // len(self.stack)


State: TypeAlias = Mapping[str, Tensor | LazySum | StackItem]
"""A state that can be published: tensors by name."""
Like: TypeAlias = Mapping[str, Tensor | ShardSpec]
"""The tensors wanted, by name: each in a DTensor's sharding, the part of a `ShardSpec`, or whole (a plain tensor)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shard:
    """One rank's part of one tensor.

    Attributes:
        full_shape: The shape of the whole tensor.
        box: The part within the whole.
        local: Its values, detached.
        added: Returns a term to be added for a box; None for none.
    """

    full_shape: tuple[int, ...]
    box: Box
    local: Tensor
    added: Callable[[Box], Tensor] | None = None

    def values(self) -> Tensor:
        """Return the values to publish: `local`, or a new tensor with `added`."""
        return self.local if self.added is None else self.local + self.added(self.box)


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a DTensor. Does not import DTensor, which callers without any do not need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_shards(state: State, *, rank: int) -> dict[str, Shard]:
    """Return the parts of a state dict that this rank has to publish; other names are omitted.

    A replicated value is published by one rank: a plain tensor by rank 0, a DTensor by the first rank along every mesh
    dimension over which it is replicated. Nothing is gathered. Raises WeightsError as `local_shards` does.
    """
    return local_shards({name: value for name, value in state.items() if _publishes(value, rank)})


def local_shards(state: State) -> dict[str, Shard]:
    """Return the parts of a state dict that this rank has; names of which it has none are omitted.

    Nothing is gathered. Raises WeightsError for a partial sum that has not been reduced, or a part that is not a box.
    """
    shards: dict[str, Shard] = {}
    tensor, whole = None, None
    for name, value in state.items():
        if (stored := _stored(value)) is not tensor:  # a stack is that of many items, which follow each other
            tensor, whole = stored, _shard(name, stored)
        if whole is None:
            continue
        if isinstance(value, LazySum):
            shards[name] = replace(whole, added=value.added)
        elif not isinstance(value, StackItem):
            shards[name] = whole
        elif (item := _select(whole, value.index)) is not None:
            shards[name] = item
    return shards


def _stored(value: Tensor | LazySum | StackItem) -> Tensor:
    if isinstance(value, LazySum):
        return value.base
    return value.stack if isinstance(value, StackItem) else value


def _publishes(value: Tensor | LazySum | StackItem, rank: int) -> bool:
    tensor = _stored(value)
    if not is_dtensor(tensor):
        return not rank
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False  # this rank is outside of the tensor's mesh
    return not any(
        index and placement.is_replicate()
        for index, placement in zip(coordinate, tensor.placements, strict=True)
    ) and (bool(tensor.numel()) or not any(coordinate))


def _shard(name: str, tensor: Tensor) -> Shard | None:
    full_shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Shard(full_shape=full_shape, box=Box.of_shape(full_shape), local=tensor.detach())
    for placement in tensor.placements:
        if placement.is_partial():
            raise WeightsError(
                f"expected {name!r} to be sharded or replicated, got {placement}; reduce it first"
            )
    _require_contiguous(name, tensor)
    box = dtensor_box(tensor)
    if tensor.numel() and not box.numel:
        return None
    return Shard(full_shape=full_shape, box=box, local=tensor.to_local().detach())


def _select(stack: Shard, index: int) -> Shard | None:
    first, count = stack.box.start[0], stack.box.shape[0]
    if not first <= index < first + count:
        return None
    return Shard(
        full_shape=stack.full_shape[1:],
        box=Box(start=stack.box.start[1:], shape=stack.box.shape[1:]),
        local=stack.local[index - first],
    )


def _require_contiguous(name: str, tensor: "DTensor") -> None:
    """Raise WeightsError if a rank has several boxes: FSDP over TP yields one only while both shard the tensor."""
    for dimension, placement in enumerate(tensor.placements):
        split_factor, dim = getattr(placement, "split_factor", None), getattr(placement, "dim", None)
        if split_factor is None:
            continue
        later_dimensions = range(dimension + 1, len(tensor.placements))
        inner_sizes = [
            tensor.device_mesh.size(n) for n in later_dimensions if tensor.placements[n].is_shard(dim)
        ]
        if split_factor != math.prod(inner_sizes):
            raise WeightsError(
                f"expected every rank to have one box of {name!r}, got {tensor.placements}, by which a rank has "
                "several; publish it in the sharding that it is trained in"
            )


def dtensor_box(tensor: "DTensor") -> Box:
    """Return the part of a DTensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(start=tuple(start), shape=tuple(shape))


ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line."""

Key: TypeAlias = PolicyVersion | str
"""The key of a snapshot: a version of the policy, or any name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredPart:
    """The location of one rank's part of a tensor in its segment, in bytes; `dtype` is the dtype's name in torch."""

    full_shape: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Publication:
    """The identity of one publication of a key, the same on every rank.

    Attributes:
        group: The name of the group of publishers.
        number: The number of the group's publications in the key's series so far, this one included.
    """

    group: str
    number: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Origin:
    """A publishing process.

    Attributes:
        machine: The machine and namespace in which its process id is valid.
        pid: The process id.
        started: The start time as in /proc, which detects a reused process id.
        rank: Its rank among the publishers.
    """

    machine: str
    pid: int
    started: int
    rank: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Contribution:
    """The location and layout of the part of a snapshot that one rank has published. It is small and picklable.

    Attributes:
        origin: The publishing process.
        location: The address of its segment, whose type depends on the transport.
        parts: The layout, by tensor name.
    """

    origin: Origin
    location: object
    parts: Mapping[str, StoredPart]


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """A complete snapshot, with one contribution per rank, in their order."""

    key: Key
    publication: Publication
    contributions: Sequence[Contribution]

    def parts(self) -> dict[str, list[tuple[int, StoredPart]]]:
        """Return the parts of each tensor, each with the rank that published it."""
        parts: dict[str, list[tuple[int, StoredPart]]] = {}
        for rank, contribution in enumerate(self.contributions):
            for name, part in contribution.parts.items():
                parts.setdefault(name, []).append((rank, part))
        return parts


def key_text(key: Key) -> str:
    """Return a key's text for messages."""
    return repr(key) if isinstance(key, str) else f"version {key}"


def align(offset: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def layout(
    shards: Mapping[str, Shard], *, header: int, dtype: torch.dtype | None = None
) -> tuple[dict[str, StoredPart], int]:
    """Lay shards out one after another after a header; returns their locations and the total number of bytes."""
    parts: dict[str, StoredPart] = {}
    offset = header
    for name, shard in shards.items():
        part_dtype = dtype if dtype is not None and shard.local.is_floating_point() else shard.local.dtype
        nbytes = shard.local.numel() * part_dtype.itemsize
        parts[name] = StoredPart(
            full_shape=shard.full_shape,
            box=shard.box,
            dtype=str(part_dtype).removeprefix("torch."),
            offset=offset,
            nbytes=nbytes,
        )
        offset = align(offset + nbytes)
    return parts, offset
