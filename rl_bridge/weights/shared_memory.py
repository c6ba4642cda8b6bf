"""Snapshots through anonymous shared memory, for processes of one machine.

A publisher owns a ring of segments, each an anonymous file in memory (memfd). A reader opens it through
the publisher's entry in /proc. Nothing ever has a name in a file system, so nothing can be left behind,
however a process ends. Segments are reused, because writing to fresh memory costs about ten times as much
as writing to memory that has been touched.

A snapshot is immutable until its segment comes round again. Each segment begins with a generation number,
which grows when writing begins and when it ends; a reader checks it before and after, so it never takes a
mixture of two versions for one.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rl_bridge.errors import SnapshotOverwritten, WeightsError
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.snapshot import ALIGNMENT, aligned

HEADER = ALIGNMENT
"""Bytes before the first tensor; the generation number is the first eight of them."""
_NAME = "ropewalk-weights"
_GENERATION_BITS = 62


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """Where one tensor lies in a segment.

    Attributes:
        shape: As of `torch.Tensor.shape`.
        dtype: The name within torch, for example `float32`.
        offset: First byte.
        nbytes: Length in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class SnapshotHandle:
    """Names one published version. Small and picklable: it is what travels between actors.

    Attributes:
        version: Of the weights.
        generation: The segment's generation number when the snapshot was complete; tells a reader that came
            too late that the segment now holds something else.
        pid: The publisher's process.
        fd: The segment's file descriptor in that process.
        nbytes: Size of the segment.
        tensors: What lies where.
    """

    version: PolicyVersion
    generation: int
    pid: int
    fd: int
    nbytes: int
    tensors: Mapping[str, TensorSpec]


class _Segment:
    """One anonymous file in memory, mapped for writing."""

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise WeightsError("the shared-memory transport needs Linux (memfd_create)")
        self.nbytes = nbytes
        self.fd = os.memfd_create(_NAME)
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise WeightsError(f"cannot reserve {nbytes} bytes of shared memory: {error.strerror}") from error
        self._generation = ctypes.c_uint64.from_buffer(self.map)
        # Drawn, so that a late handle does not fit a later segment that got the same descriptor.
        self._generation.value = secrets.randbits(_GENERATION_BITS) * 2

    @property
    def generation(self) -> int:
        return self._generation.value

    @generation.setter
    def generation(self, value: int) -> None:
        self._generation.value = value

    def close(self) -> None:
        del self._generation
        self.map.close()
        os.close(self.fd)


class SharedMemoryPublisher:
    """Publishes versions of a state dict into a ring of segments.

    Args:
        depth: Segments in the ring: how many versions stay readable at once.
    """

    def __init__(self, *, depth: int = 2) -> None:
        if depth < 2:
            raise ValueError(f"expected a ring of at least 2 segments, got {depth}")
        self._ring: list[_Segment | None] = [None] * depth
        self._next = 0

    def publish(self, version: PolicyVersion, state: Mapping[str, Tensor]) -> SnapshotHandle:
        """Copy the tensors into the ring's oldest segment.

        Args:
            version: What the snapshot is called.
            state: Dense tensors on any device.

        Returns:
            The handle by which other processes read it.

        Raises:
            WeightsError: There is nothing to publish, no memory to publish it to, or the publisher is closed.
        """
        if not self._ring:
            raise WeightsError(f"expected an open publisher for version {version}, got a closed one")
        if not state:
            raise WeightsError("expected a state dict with at least one tensor, got an empty one")
        tensors, nbytes = _layout(state)
        segment = self._segment(nbytes)
        segment.generation += 1  # fits no handle while it is being written
        target = torch.frombuffer(segment.map, dtype=torch.uint8)
        for name, tensor in state.items():
            spec = tensors[name]
            view = target[spec.offset : spec.offset + spec.nbytes].view(tensor.dtype).view(spec.shape)
            view.copy_(tensor.detach())
        del target
        segment.generation += 1
        return SnapshotHandle(
            version=version,
            generation=segment.generation,
            pid=os.getpid(),
            fd=segment.fd,
            nbytes=nbytes,
            tensors=tensors,
        )

    def _segment(self, nbytes: int) -> _Segment:
        slot = self._next
        self._next = (slot + 1) % len(self._ring)
        segment = self._ring[slot]
        if segment is not None and segment.nbytes != nbytes:
            segment.close()
            segment = None
        if segment is None:
            segment = self._ring[slot] = _Segment(nbytes)
        return segment

    def close(self) -> None:
        """Give the memory back. Handles that are still about can no longer be read."""
        ring, self._ring = self._ring, []
        for segment in ring:
            if segment is not None:
                segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_snapshot(handle: SnapshotHandle) -> dict[str, Tensor]:
    """Copy a snapshot out of shared memory.

    Args:
        handle: From `SharedMemoryPublisher.publish`, in this process or another of the same user.

    Returns:
        Tensors on the CPU that belong to the caller.

    Raises:
        SnapshotOverwritten: The segment holds a newer version by now.
        WeightsError: The publisher is gone.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        if _NAME not in os.readlink(path):
            # The process closed its segment and uses the number for something else.
            raise WeightsError(f"version {handle.version} is gone: its publisher has closed it")
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightsError(
            f"cannot open version {handle.version} at {path} ({error.strerror}); "
            "is its publisher alive, on this machine, and of the same user?"
        ) from error
    try:
        with mmap.mmap(fd, handle.nbytes) as mapped:
            generation = ctypes.c_uint64.from_buffer(mapped)
            try:
                _check(handle, generation.value)
                copy = torch.empty(handle.nbytes, dtype=torch.uint8)
                source = torch.frombuffer(mapped, dtype=torch.uint8)
                copy.copy_(source)
                del source
                _check(handle, generation.value)
            finally:
                del generation
    except (ValueError, OSError) as error:
        raise WeightsError(f"cannot map version {handle.version}: {error}") from error
    finally:
        os.close(fd)
    return {
        name: copy[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for name, spec in handle.tensors.items()
    }


def _check(handle: SnapshotHandle, generation: int) -> None:
    if generation != handle.generation:
        raise SnapshotOverwritten(
            f"version {handle.version} was generation {handle.generation} of its segment, which is now at "
            f"{generation}; read a snapshot before as many newer ones are published as the ring is deep"
        )


def _layout(state: Mapping[str, Tensor]) -> tuple[dict[str, TensorSpec], int]:
    tensors: dict[str, TensorSpec] = {}
    offset = HEADER
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.element_size()
        tensors[name] = TensorSpec(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=offset,
            nbytes=nbytes,
        )
        offset = aligned(offset + nbytes)
    return tensors, offset
