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
class Wanted:
    """One tensor that a reader wants, and its sources: published parts with their ranks."""

    name: str
    box: Box
    dtype: torch.dtype
    sources: Sequence[tuple[int, StoredPart]]

    @property
    def contained(self) -> bool:
        """Whether one published part holds all of it in the wanted dtype, so that a view of it suffices."""
        if len(self.sources) != 1:
            return False
        part = self.sources[0][1]
        return part.box.intersection(self.box) == self.box and torch_dtype(part) == self.dtype


def plan_reads(snapshot: Snapshot, like: Like | None) -> list[Wanted]:
    """Plan which parts are read from which rank.

    Raises WeightsError if a tensor is missing, has another shape, or is incomplete.
    """
    parts = snapshot.parts()
    if like is None:
        like = {name: ShardSpec(box=Box.whole(stored[0][1].whole)) for name, stored in parts.items()}
    result = []
    for name, model in like.items():
        if name not in parts:
            raise WeightsError(f"expected {name!r} in {key_text(snapshot.key)}, it was not published with it")
        result.append(_like(snapshot, name, parts[name], model))
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
        wants: Sequence[Wanted],
        held: Mapping[int, Tensor],
        like: Like | None = None,
        *,
        device: torch.device | str = "cpu",
        copy: bool = False,
    ) -> None:
        self._wants = {want.name: want for want in wants}
        self._held = held
        self._like = like or {}
        self._device = torch.device(device)
        self._copy = copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._wants)

    def __len__(self) -> int:
        return len(self._wants)

    def __getitem__(self, name: str) -> Tensor:
        want, model = self._wants[name], self._like.get(name)
        if want.contained and not self._copy:
            ((rank, part),) = want.sources
            local = view(self._held[rank], part)[want.box.within(part.box)]
        else:
            device = model.device if isinstance(model, Tensor) else self._device
            local = torch.empty(want.box.shape, dtype=want.dtype, device=device)
            copy_all(_copies(local, want, self._held))
        return _distribute(local, model) if is_dtensor(model) else local

    def __contains__(self, name: object) -> bool:
        return name in self._wants  # Mapping's default would assemble the tensor

    @property
    def held(self) -> Mapping[int, Tensor]:
        """The bytes that tensors are assembled from, by rank."""
        return self._held

    def copied_to(self, device: torch.device | str) -> "SnapshotState":
        """Return the same state with each tensor a copy on a device."""
        return SnapshotState(list(self._wants.values()), self._held, self._like, device=device, copy=True)

    def without_data(self) -> dict[str, Tensor]:
        """Return the shapes and dtypes as tensors on the device `meta`, without assembling anything."""
        return {
            name: torch.empty(want.box.shape, dtype=want.dtype, device="meta")
            for name, want in self._wants.items()
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


def _copies(
    destination: Tensor, want: Wanted, buffers: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copies that assemble a tensor: views of `destination` and of the parts that overlap it."""
    for rank, part in want.sources:
        overlap = part.box.intersection(want.box)
        if overlap is not None:
            yield destination[overlap.within(want.box)], view(buffers[rank], part)[overlap.within(part.box)]


def _like(
    snapshot: Snapshot, name: str, stored: Sequence[tuple[int, StoredPart]], model: Tensor | ShardSpec
) -> Wanted:
    whole = stored[0][1].whole
    if isinstance(model, ShardSpec):
        box, dtype = model.box, model.dtype or torch_dtype(stored[0][1])
        fits = all(a >= 0 and a + n <= w for a, n, w in zip(box.start, box.shape, whole, strict=True))
    else:
        box = dtensor_box(model) if is_dtensor(model) else Box.whole(model.shape)
        dtype, fits = model.dtype, tuple(model.shape) == whole
    if not fits:
        requested = (
            f"{box.shape} from {box.start}" if isinstance(model, ShardSpec) else f"{tuple(model.shape)}"
        )
        raise WeightsError(
            f"expected a part of {name!r} within {whole}, its shape in {key_text(snapshot.key)}, got {requested}"
        )
    return _want(snapshot, name, box, dtype, stored)


def _want(
    snapshot: Snapshot, name: str, box: Box, dtype: torch.dtype, stored: Sequence[tuple[int, StoredPart]]
) -> Wanted:
    sources = [(rank, part) for rank, part in stored if part.box.intersection(box) is not None]
    covered = sum(overlap.numel for _, part in sources if (overlap := part.box.intersection(box)) is not None)
    if covered != box.numel:
        raise WeightsError(
            f"expected the {box.numel} elements of {name!r} that are wanted once each in {key_text(snapshot.key)}, "
            f"got {covered}; did every rank publish, each its own shards?"
        )
    return Wanted(name=name, box=box, dtype=dtype, sources=sources)


MAX_THREADS = 4
WORTH_A_THREAD = 1 << 20
"""Bytes per thread: fewer are copied faster than another thread wakes up."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each pair's second tensor into the first, of the same shape; returns when all threads have finished."""
    waiting = deque(sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True))
    if (gpu := next((source.device for _, source in waiting if source.is_cuda), None)) is not None:
        _copy_from_gpu(waiting, gpu)
        return
    threads = min(_threads(), 1 + sum(target.nbytes for target, _ in waiting) // WORTH_A_THREAD)
    helpers = [_pool().submit(_copy, waiting) for _ in range(threads - 1)]
    try:
        _copy(waiting)
    finally:
        waiting.clear()
        wait(helpers)
    for helper in helpers:
        helper.result()


def _copy_from_gpu(pairs: Iterable[tuple[Tensor, Tensor]], gpu: torch.device) -> None:
    """Copy on a separate stream, after the GPU work submitted so far and concurrently with later work."""
    stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]  # torch says no types
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


def _copy(waiting: deque[tuple[Tensor, Tensor]]) -> None:
    while waiting:
        try:
            target, source = waiting.popleft()
        except IndexError:  # another thread took the last one
            return
        target.copy_(source)


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="weights")
