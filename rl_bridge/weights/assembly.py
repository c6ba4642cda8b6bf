"""Assembly of the tensors that a reader wants from the bytes that ranks have published."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.weights.snapshot import (
    Box,
    Like,
    ShardSpec,
    Snapshot,
    StoredPart,
    dtensor_box,
    is_dtensor,
    key_text,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorRead:
    """One tensor that a reader wants, and its sources: published parts with their ranks."""

    name: str
    box: Box
    dtype: torch.dtype
    sources: Sequence[tuple[int, StoredPart]]

    @property
    def is_view(self) -> bool:
        """Whether one published part holds all of it in the wanted dtype, so that a view of it suffices."""
        if len(self.sources) != 1:
            return False
        part = self.sources[0][1]
        return part.box.intersection(self.box) == self.box and torch_dtype(part) == self.dtype


def plan_reads(snapshot: Snapshot, like: Like | None) -> list[TensorRead]:
    """Plan which parts are read from which rank.

    Raises WeightsError if a tensor is missing, has another shape, or is incomplete.
    """
    parts = snapshot.parts()
    if like is None:
        like = {name: ShardSpec(box=Box.of_shape(stored[0][1].full_shape)) for name, stored in parts.items()}
    result = []
    for name, target in like.items():
        if name not in parts:
            raise WeightsError(f"expected {name!r} in {key_text(snapshot.key)}, it was not published with it")
        result.append(_like(snapshot, name, parts[name], target))
    return result


def torch_dtype(part: StoredPart) -> torch.dtype:
    """Return the dtype of a part's elements."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def view(data: Tensor, part: StoredPart) -> Tensor:
    """Return a part as a tensor that views its bytes."""
    flat = data[part.offset : part.offset + part.nbytes].view(torch_dtype(part))
    return flat.view(part.box.shape)


class SnapshotState(Mapping[str, Tensor]):
    """The tensors of a snapshot, each assembled on access.

    A tensor that one rank has published whole is viewed in place, without a copy (unless `copy`). A tensor in parts, or
    of another dtype, is assembled on each access, on `device` or that of `like`: so at most one tensor of a model takes
    memory beside those that callers keep.
    """

    def __init__(
        self,
        reads: Sequence[TensorRead],
        held: Mapping[int, Tensor],
        like: Like | None = None,
        *,
        device: torch.device | str = "cpu",
        copy: bool = False,
    ) -> None:
        self._reads = {read.name: read for read in reads}
        self._held = held
        self._like = like or {}
        self._device = torch.device(device)
        self._copy = copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)

    def __getitem__(self, name: str) -> Tensor:
        read, target = self._reads[name], self._like.get(name)
        if read.is_view and not self._copy:
            ((rank, part),) = read.sources
            local = view(self._held[rank], part)[read.box.index_in(part.box)]
        else:
            device = target.device if isinstance(target, Tensor) else self._device
            local = torch.empty(read.box.shape, dtype=read.dtype, device=device)
            copy_all(_iterate_copies(local, read, self._held))
        return _distribute(local, target) if is_dtensor(target) else local

    def __contains__(self, name: object) -> bool:
        return name in self._reads  # Mapping's default would assemble the tensor

    @property
    def held(self) -> Mapping[int, Tensor]:
        """The bytes that tensors are assembled from, by rank."""
        return self._held

    def copy_to(self, device: torch.device | str) -> "SnapshotState":
        """Return the same state with each tensor a copy on a device."""
        return SnapshotState(list(self._reads.values()), self._held, self._like, device=device, copy=True)

    def without_data(self) -> dict[str, Tensor]:
        """Return the shapes and dtypes as tensors on the device `meta`, without assembling anything."""
        return {
            name: torch.empty(read.box.shape, dtype=read.dtype, device="meta")
            for name, read in self._reads.items()
        }


def without_data(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state dict whose shapes and dtypes can be read without assembling tensors."""
    return state.without_data() if isinstance(state, SnapshotState) else state


def _distribute(local: Tensor, model: "DTensor") -> Tensor:
    from torch.distributed.tensor import DTensor

    shared: Tensor = DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
    return shared


def _iterate_copies(
    destination: Tensor, read: TensorRead, buffers: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copies that assemble a tensor: views of `destination` and of the parts that overlap it."""
    for rank, part in read.sources:
        overlap = part.box.intersection(read.box)
        if overlap is not None:
            yield (
                destination[overlap.index_in(read.box)],
                view(buffers[rank], part)[overlap.index_in(part.box)],
            )


def _like(
    snapshot: Snapshot, name: str, stored: Sequence[tuple[int, StoredPart]], target: Tensor | ShardSpec
) -> TensorRead:
    full_shape = stored[0][1].full_shape
    if isinstance(target, ShardSpec):
        box, dtype = target.box, target.dtype or torch_dtype(stored[0][1])
        is_within = all(
            a >= 0 and a + n <= w for a, n, w in zip(box.start, box.shape, full_shape, strict=True)
        )
    else:
        box = dtensor_box(target) if is_dtensor(target) else Box.of_shape(target.shape)
        dtype, is_within = target.dtype, tuple(target.shape) == full_shape
    if not is_within:
        requested = (
            f"{box.shape} from {box.start}" if isinstance(target, ShardSpec) else f"{tuple(target.shape)}"
        )
        raise WeightsError(
            f"expected a part of {name!r} within {full_shape}, its shape in {key_text(snapshot.key)}, got {requested}"
        )
    return _plan_read(snapshot, name, box, dtype, stored)


def _plan_read(
    snapshot: Snapshot, name: str, box: Box, dtype: torch.dtype, stored: Sequence[tuple[int, StoredPart]]
) -> TensorRead:
    sources = [(rank, part) for rank, part in stored if part.box.intersection(box) is not None]
    covered = sum(overlap.numel for _, part in sources if (overlap := part.box.intersection(box)) is not None)
    if covered != box.numel:
        raise WeightsError(
            f"expected the {box.numel} elements of {name!r} that are wanted once each in {key_text(snapshot.key)}, "
            f"got {covered}; did every rank publish, each its own shards?"
        )
    return TensorRead(name=name, box=box, dtype=dtype, sources=sources)


MAX_THREADS = 4
MIN_BYTES_PER_THREAD = 1 << 20
"""Bytes per thread: fewer are copied faster than another thread wakes up."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each pair's second tensor into the first, of the same shape; returns when all threads have finished."""
    pending = deque(sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True))
    if (gpu := next((source.device for _, source in pending if source.is_cuda), None)) is not None:
        _copy_from_gpu(pending, gpu)
        return
    threads = min(_thread_count(), 1 + sum(target.nbytes for target, _ in pending) // MIN_BYTES_PER_THREAD)
    futures = [_get_pool().submit(_copy, pending) for _ in range(threads - 1)]
    try:
        _copy(pending)
    finally:
        pending.clear()
        wait(futures)
    for future in futures:
        future.result()


def _copy_from_gpu(pairs: Iterable[tuple[Tensor, Tensor]], gpu: torch.device) -> None:
    """Copy on a separate stream, after the GPU work submitted so far and concurrently with later work."""
    stream = _get_stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


@cache
def _get_stream(gpu: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies: one, because torch keeps the memory of conversions apart for each stream."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]  # torch says no types


def _copy(pending: deque[tuple[Tensor, Tensor]]) -> None:
    while pending:
        try:
            target, source = pending.popleft()
        except IndexError:  # another thread took the last one
            return
        target.copy_(source)


def _thread_count() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def _get_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_thread_count(), thread_name_prefix="weights")
