"""Shared memory on the reader's side: mappings, copies by a few threads, leases that end with the process."""

import ctypes
import fcntl
import mmap
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.segments import SegmentAddress, has_died, own_machine
from rl_bridge.weights.snapshot import Key, Origin, key_text


@dataclass(slots=True)
class _Attachment:
    """A segment of another process, mapped for reading."""

    fd: int
    map: mmap.mmap
    bytes: Tensor
    holds: int = 0

    def generation(self) -> int:
        return int.from_bytes(self.map[: ctypes.sizeof(ctypes.c_uint64)], "little")

    def close(self) -> None:
        # The mapping goes when the last tensor over it does: views may still be about. Until then it keeps
        # the open file alive, so that locks have to be let go of expressly.
        os.close(self.fd)


class Attachments:
    """The segments that this process reads from.

    Mappings are kept from one snapshot to the next, since the first look at each page of a new one costs
    more than copying it. They are read-only: writing to a snapshot ends the process that tries.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Attachment] = {}
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, key: Key, origin: Origin, address: SegmentAddress) -> Iterator[Tensor]:
        """Keep a segment from being overwritten within the block, or for as long as this process lives.

        Args:
            key: For messages.
            origin: Who published it.
            address: Where.

        Yields:
            The segment's bytes, shape [nbytes], read-only.

        Raises:
            SnapshotOverwrittenError: The segment holds another snapshot by now.
            WeightsError: The publisher is gone.
        """
        name = origin.pid, address.inode
        with self._lock:
            attachment = self._attach(key, origin, address)
            if not attachment.holds:
                self._acquire(key, attachment)
            attachment.holds += 1
        try:
            if attachment.generation() != address.generation:
                raise _make_overwritten_error(key)
            yield attachment.bytes
        finally:
            with self._lock:
                attachment.holds -= 1
                if not attachment.holds:
                    fcntl.flock(attachment.fd, fcntl.LOCK_UN)
                    if self._kept.get(name) is not attachment:
                        attachment.close()

    def _attach(self, key: Key, origin: Origin, address: SegmentAddress) -> _Attachment:
        path = f"/proc/{origin.pid}/fd/{address.fd}"
        try:
            if os.stat(path).st_ino != address.inode:
                raise _make_overwritten_error(key)
        except OSError as error:
            if origin.machine == own_machine() and not has_died(origin):
                raise _make_overwritten_error(key) from None  # the segment itself has been given up
            self._forget(origin.pid, frozenset())
            if origin.machine != own_machine():
                why = "it is on another machine, which the transport 'rdma' can reach"
            else:
                why = "did it die? A trainer that is started again publishes anew"
            raise WeightsError(
                f"cannot open {key_text(key)} of rank {origin.rank} (process {origin.pid}, {error.strerror}): {why}"
            ) from error
        self._forget(origin.pid, address.ring)
        name = origin.pid, address.inode
        if name not in self._kept:
            self._kept[name] = _map(key, path, address)
        return self._kept[name]

    def _acquire(self, key: Key, attachment: _Attachment) -> None:
        try:
            fcntl.flock(attachment.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _make_overwritten_error(key) from None

    def _forget(self, pid: int, ring: frozenset[int]) -> None:
        """Let go of a publisher's segments that it has given up, and of publishers that are gone."""
        for name in list(self._kept):
            given_up = name[1] not in ring if name[0] == pid else not os.path.exists(f"/proc/{name[0]}")
            if given_up:
                attachment = self._kept.pop(name)
                if not attachment.holds:
                    attachment.close()

    def close(self) -> None:
        """Let go of every segment that is not being read."""
        with self._lock:
            for attachment in self._kept.values():
                if not attachment.holds:
                    attachment.close()
            self._kept.clear()


def _map(key: Key, path: str, address: SegmentAddress) -> _Attachment:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(fd, address.nbytes, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(fd)
            raise
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot map {key_text(key)} at {path}: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only is meant
        return _Attachment(fd, mapped, torch.frombuffer(mapped, dtype=torch.uint8))


def _make_overwritten_error(key: Key) -> SnapshotOverwrittenError:
    return SnapshotOverwrittenError(
        f"{key_text(key)} has been overwritten by a newer one; hold a snapshot (WeightStore.open) while it is read"
    )


MAX_THREADS = 4
WORTH_A_THREAD = 1 << 20
"""Bytes; less is copied sooner than another thread has woken."""


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, which is of its shape. Returns when no thread copies any more."""
    waiting = deque(sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True))
    if any(source.is_cuda for _, source in waiting):
        _copy_from_gpu(waiting)
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


def _copy_from_gpu(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """On a stream of its own, behind what has been asked of the GPU so far, and beside what is asked from now on."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch says no types
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


def _copy(waiting: deque[tuple[Tensor, Tensor]]) -> None:
    while waiting:
        try:
            target, source = waiting.popleft()
        except IndexError:  # another thread was quicker
            return
        target.copy_(source)


def _threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="weights")
