"""The publisher's anonymous shared memory: segments, rings of them, and checks whether a publisher is alive."""

import contextlib
import ctypes
import fcntl
import functools
import logging
import mmap
import os
import secrets
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_bridge.errors import WeightsError
from rl_bridge.weights.snapshot import ALIGNMENT, Key, Origin

logger = logging.getLogger(__name__)

HEADER = ALIGNMENT
"""Bytes before the first tensor; the first eight are the generation number."""
EXTRA_SEGMENTS = 2
"""The number of segments by which a ring may exceed its depth while readers hold older ones."""
_NAME = "ropewalk-weights"
_GENERATION_BITS = 62


@dataclass(kw_only=True, slots=True, frozen=True)
class SegmentAddress:
    """The address of a segment for readers.

    Attributes:
        fd: The file descriptor in the publisher's process.
        inode: The inode of the anonymous file, which detects a reused descriptor.
        nbytes: The size of the segment.
        generation: The segment's generation when the snapshot was complete.
        ring: The inodes of all segments of the publisher; readers can release mappings of any others.
    """

    fd: int
    inode: int
    nbytes: int
    generation: int
    ring: frozenset[int]


class Segment:
    """One anonymous file in memory, mapped for writing.

    Attributes:
        holds: The key in it, or the last one before a failed write, or that of the smaller segment that it replaces.
        last_write: Grows with every write, so that segments can be ordered by age; 0 if nothing is written yet.
        reserved: Whether a writer of this process has it.
    """

    def __init__(self, nbytes: int, *, holds: Key | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise WeightsError("the shared-memory transport needs Linux (memfd_create)")
        _require_memory(nbytes)
        self.nbytes = nbytes
        self.holds = holds
        self.last_write = 0
        self.reserved = False
        self.fd = os.memfd_create(_NAME)
        try:
            os.ftruncate(self.fd, nbytes)
            # Allocated now, where a failure raises an error; on a later write it would be a fatal signal.
            os.posix_fallocate(self.fd, 0, nbytes)
            self.map = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            os.close(self.fd)
            raise _make_memory_error(nbytes, str(error)) from error
        self.inode = os.fstat(self.fd).st_ino
        self._generation = ctypes.c_uint64.from_buffer(self.map)
        # Random, so that a stale address does not match a later segment with the same descriptor.
        self._generation.value = secrets.randbits(_GENERATION_BITS) * 2
        self._pinned = self._pin()

    def _pin(self) -> bool:
        """Page-lock it if this process uses a GPU, which can then copy into it directly, concurrently with kernels."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types
            return False
        address = ctypes.addressof(self._generation)
        is_pinned = int(_cuda_runtime().cudaHostRegister(address, self.nbytes, 0)) == 0
        if not is_pinned:
            # CUDA keeps the failure as the thread's last error, which torch raises and clears at the next kernel.
            # torch has no binding of cudaGetLastError, so a kernel here clears it before one of the trainer's would.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            logger.warning("CUDA cannot page-lock %d bytes; weights are copied more slowly", self.nbytes)
        return is_pinned

    @property
    def generation(self) -> int:
        """The generation number, which is odd while the segment is being written."""
        return self._generation.value

    def begin(self) -> None:
        """Mark it as being written, so that it matches no address."""
        self._generation.value |= 1

    def end(self) -> None:
        """Mark its content as complete."""
        self._generation.value += 1

    def lock(self) -> bool:
        """Lock it for writing; False if a reader holds it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Unlock it for readers."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def readers(self) -> list[int]:
        """Return the ids of the reading processes, as far as they are known."""
        pids = []
        for line in Path("/proc/locks").read_text().splitlines():
            columns = line.split()  # 1: FLOCK ADVISORY READ <pid> <major>:<minor>:<inode> 0 EOF
            if columns[1:2] == ["FLOCK"] and columns[3] == "READ" and columns[5].endswith(f":{self.inode}"):
                pids.append(int(columns[4]))
        return pids

    def close(self) -> None:
        """Close it; its memory is free once no reader has it mapped either."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(ctypes.addressof(self._generation))
        del self._generation
        self.map.close()
        os.close(self.fd)


def map_segment(pid: int, fd: int, nbytes: int) -> tuple[int, mmap.mmap, torch.Tensor]:
    """Open another process's segment for reading; returns a file descriptor, its mapping, and that as a tensor."""
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(own_fd, nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        os.close(own_fd)
        raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tensor is read-only on purpose
        return own_fd, mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch says no types


@dataclass(slots=True)
class SegmentRing:
    """The segments that a series of snapshots cycles through: `depth` readable ones and up to a few more."""

    depth: int
    on_close: Callable[[Segment], None] = lambda segment: None
    segments: list[Segment] = field(default_factory=list)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve(self, nbytes: int) -> Segment | None:
        """Get a locked segment of at least `nbytes` to write into.

        None if readers hold all segments that may be overwritten.
        """
        with self._lock:
            by_age = sorted(self.segments, key=lambda segment: segment.last_write)
            # The newest are kept for readers that have not opened them yet.
            replaced_key: Key | None = None
            for segment in by_age[: max(0, len(by_age) - (self.depth - 1))]:
                if segment.reserved or not segment.lock():
                    continue
                if segment.nbytes >= nbytes:
                    segment.reserved = True
                    return segment
                self.segments.remove(segment)
                replaced_key = segment.holds
                self._close(segment)
                break
            if len(self.segments) >= self.depth + EXTRA_SEGMENTS:
                return None
            segment = Segment(nbytes, holds=replaced_key)
            segment.lock()
            segment.reserved = True
            self.segments.append(segment)
            return segment

    def return_unused(self, segment: Segment) -> None:
        """Release a reserved segment that was not written to."""
        with self._lock:
            self._unreserve(segment)

    def release(self, segment: Segment, *, is_complete: bool) -> None:
        """Release a reserved segment after a write; if the write failed, the segment is the next to be reused."""
        with self._lock:
            self._count += 1
            segment.last_write = self._count if is_complete else 0
            self._unreserve(segment)

    def _unreserve(self, segment: Segment) -> None:
        segment.reserved = False
        segment.unlock()
        if segment not in self.segments:
            self._close(segment)  # the ring was closed meanwhile

    def close(self) -> None:
        """Close all segments. Readers that hold a segment keep it."""
        with self._lock:
            segments, self.segments = self.segments, []
            for segment in segments:
                if not segment.reserved:
                    self._close(segment)

    def _close(self, segment: Segment) -> None:
        self.on_close(segment)
        segment.close()


def _require_memory(nbytes: int) -> None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            if nbytes > available:
                raise _make_memory_error(nbytes, f"{available} are available")


def _make_memory_error(nbytes: int, reason: str) -> WeightsError:
    return WeightsError(
        f"cannot reserve {nbytes} bytes of shared memory: {reason}; "
        "`ropewalk plan` says what a run keeps in the memory of its hosts"
    )


def own_origin(rank: int) -> Origin:
    """Return the origin of this process as rank `rank` of the publishers."""
    start_ticks = _read_start_ticks(os.getpid())
    assert start_ticks is not None
    return Origin(machine=machine_identifier(), pid=os.getpid(), started=start_ticks, rank=rank)


@functools.cache
def machine_identifier() -> str:
    """Return an identifier of this machine and process id namespace, within which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def has_died(origin: Origin) -> bool:
    """Whether a publisher is certainly dead; False for other machines, where that is unknown."""
    return origin.machine == machine_identifier() and _read_start_ticks(origin.pid) != origin.started


def _read_start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain blanks
    return None if fields[0] in "ZX" else int(fields[19])
