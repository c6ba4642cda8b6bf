"""The interface of transports, and the one for a single machine: shared memory, read without a copy."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights.segments import (
    HEADER,
    Segment,
    SegmentAddress,
    SegmentRing,
    has_died,
    machine_identifier,
    map_segment,
)
from rl_bridge.weights.snapshot import Key, Origin, Snapshot, StoredPart, key_text

Needed: TypeAlias = Mapping[int, Collection[str]]
"""The names of the tensors that a reader needs, by rank."""


@dataclass(kw_only=True, slots=True)
class Reservation:
    """Memory for one rank's part of a snapshot.

    Attributes:
        target: The memory, shape [nbytes], uint8. Tensors go to the offsets of the layout.
        replaces: The key that has been readable from this memory so far; None if there was none.
        publish: Call this when the target is complete; returns its address for readers.
    """

    target: Tensor
    replaces: Key | None
    publish: Callable[[Mapping[str, StoredPart]], Awaitable[object]]


class Publisher(Protocol):
    """The sending side, in one rank's process; `header` bytes precede the first tensor in its memory."""

    header: int

    def reserve(
        self, key: Key, rank: int, nbytes: int, devices: Collection[torch.device] = ()
    ) -> AbstractAsyncContextManager[Reservation]:
        """Reserve memory for a rank's part of a snapshot, whose tensors are on `devices`.

        Waits for readers of what is to be overwritten; WeightsError if that takes too long.
        """

    async def close(self) -> None:
        """Release everything."""


class TransportReader(Protocol):
    """The receiving side."""

    def hold(self, snapshot: Snapshot, needed: Needed) -> AbstractAsyncContextManager[Mapping[int, Tensor]]:
        """Hold the bytes of some ranks' segments, unchanged within the block; bytes not in `needed` may be arbitrary.

        Raises:
            SnapshotOverwrittenError: They have been overwritten already.
            WeightsError: A publisher is gone.
        """

    async def close(self) -> None:
        """Release all segments."""


def allocate_memory(nbytes: int) -> Tensor:
    """Allocate memory of this process, shape [nbytes]; WeightsError if there is not enough."""
    try:
        return torch.empty(max(1, nbytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise WeightsError(f"cannot reserve {nbytes} bytes: {error}") from error


POLL_INTERVAL_S = 0.002
"""How often it is checked whether readers have released a segment: the kernel sends no notification."""


class SegmentPublisher:
    """The sending side of shared memory. It waits `timeout_s` for readers of segments that are to be overwritten."""

    header = HEADER

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        self._depth = depth
        self._timeout_s = timeout_s
        # One ring for all versions, which replace one another, and one per name, which stays beside them.
        self._rings: dict[str | None, SegmentRing] = {}

    @asynccontextmanager
    async def reserve(
        self, key: Key, rank: int, nbytes: int, devices: Collection[torch.device] = ()
    ) -> AsyncIterator[Reservation]:
        """See `Publisher`."""
        name = key if isinstance(key, str) else None
        ring = self._rings.setdefault(name, SegmentRing(self._depth, on_close=self._release_resources))
        segment = await self._wait_for_segment(ring, key, self._segment_bytes(nbytes))
        is_complete = False

        async def publish(parts: Mapping[str, StoredPart]) -> object:
            nonlocal is_complete
            segment.end()
            address = await self._address(segment, parts)
            segment.holds, is_complete = key, True
            return address

        segment.begin()  # matches no address while it is being written
        try:
            reservation = Reservation(
                target=self._target(segment, nbytes, devices),
                # Reported until another snapshot is complete: an earlier report may have been lost, and readers on
                # other machines rely on it.
                replaces=segment.holds,
                publish=publish,
            )
            try:
                yield reservation
            finally:
                del reservation.target  # a mapping cannot be closed while a tensor refers to it
        finally:
            ring.release(segment, is_complete=is_complete)

    def _segment_bytes(self, nbytes: int) -> int:
        """Return the size of a segment for `nbytes` bytes of tensors."""
        return nbytes

    def _target(self, segment: Segment, nbytes: int, devices: Collection[torch.device]) -> Tensor:
        """Return the memory to write to for a segment without readers."""
        return torch.frombuffer(segment.map, dtype=torch.uint8)

    async def _wait_for_segment(self, ring: SegmentRing, key: Key, nbytes: int) -> Segment:
        deadline = time.monotonic() + self._timeout_s
        while (segment := await _reserve(ring, nbytes)) is None:
            if time.monotonic() > deadline:
                readers = sorted({pid for held_segment in ring.segments for pid in held_segment.readers()})
                reader_names = ", ".join(f"process {pid}" for pid in readers) or "nobody known"
                raise WeightsError(
                    f"expected one of {len(ring.segments)} segments to be free for {key_text(key)} within "
                    f"{self._timeout_s:g} s, but the older ones are being read, by {reader_names}; "
                    "a reader that hangs while it holds a snapshot is the usual cause"
                )
            await asyncio.sleep(POLL_INTERVAL_S)
        return segment

    async def _address(self, segment: Segment, parts: Mapping[str, StoredPart]) -> object:
        """Return the address of a written segment for readers."""
        return self._segment_address(segment)

    def _segment_address(self, segment: Segment) -> SegmentAddress:
        inodes = (held_segment.inode for ring in self._rings.values() for held_segment in ring.segments)
        return SegmentAddress(
            fd=segment.fd,
            inode=segment.inode,
            nbytes=segment.nbytes,
            generation=segment.generation,
            ring=frozenset(inodes),
        )

    def _release_resources(self, segment: Segment) -> None:
        """Release resources of a segment that is about to be closed."""

    async def close(self) -> None:
        """See `Publisher`. Readers that hold a segment keep it."""
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            await asyncio.to_thread(ring.close)


async def _reserve(ring: SegmentRing, nbytes: int) -> Segment | None:
    """Reserve a segment on a thread, since allocating takes a while; on cancellation the segment is put back."""
    reservation = asyncio.ensure_future(asyncio.to_thread(ring.reserve, nbytes))
    try:
        return await asyncio.shield(reservation)
    except asyncio.CancelledError:
        # By a callback, since the wait below may be cancelled too.
        reservation.add_done_callback(partial(_return_segment, ring))
        await asyncio.wait({reservation})
        raise


def _return_segment(ring: SegmentRing, reservation: "asyncio.Future[Segment | None]") -> None:
    if reservation.cancelled() or reservation.exception() is not None:
        return
    if (segment := reservation.result()) is not None:
        ring.return_unused(segment)


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
        # The mapping is released with the last tensor over it, since views may still exist. Until then it keeps the
        # open file alive, so locks must be released explicitly.
        os.close(self.fd)


class SegmentReader:
    """The receiving side of shared memory.

    Mappings are kept from one snapshot to the next, since page faults of a new mapping cost more than a copy. They are
    read-only: writing to a snapshot kills the process that tries.
    """

    def __init__(self) -> None:
        self._attachments: dict[tuple[int, int], _Attachment] = {}
        self._lock = threading.Lock()

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[Mapping[int, Tensor]]:
        """See `TransportReader`. The bytes are the publishers' own, mapped for reading only."""
        with ExitStack() as stack:
            tensors: dict[int, Tensor] = {}
            for rank in sorted(needed):
                contribution = snapshot.contributions[rank]
                address = contribution.location
                assert isinstance(address, SegmentAddress)
                tensors[rank] = stack.enter_context(self.attach(snapshot.key, contribution.origin, address))
            yield tensors

    @contextmanager
    def attach(self, key: Key, origin: Origin, address: SegmentAddress) -> Iterator[Tensor]:
        """Hold a segment's bytes; it is not overwritten within the block while this process lives."""
        name = origin.pid, address.inode
        with self._lock:
            attachment = self._attach(key, origin, address)
            if not attachment.holds:
                try:
                    fcntl.flock(attachment.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise make_overwritten_error(key) from None
            attachment.holds += 1
        try:
            if attachment.generation() != address.generation:
                raise make_overwritten_error(key)
            yield attachment.bytes
        finally:
            with self._lock:
                attachment.holds -= 1
                if not attachment.holds:
                    fcntl.flock(attachment.fd, fcntl.LOCK_UN)
                    if self._attachments.get(name) is not attachment:
                        attachment.close()

    def _attach(self, key: Key, origin: Origin, address: SegmentAddress) -> _Attachment:
        path = f"/proc/{origin.pid}/fd/{address.fd}"
        try:
            if os.stat(path).st_ino != address.inode:
                raise make_overwritten_error(key)
        except OSError as error:
            if origin.machine == machine_identifier() and not has_died(origin):
                raise make_overwritten_error(key) from None  # the publisher has dropped the segment
            self._drop_attachments(origin.pid, frozenset())
            if origin.machine != machine_identifier():
                reason = "it is on another machine, which the transport 'rdma' can reach"
            else:
                reason = "did it die? A restarted trainer publishes again"
            raise WeightsError(
                f"cannot open {key_text(key)} of rank {origin.rank} (process {origin.pid}, {error.strerror}): {reason}"
            ) from error
        self._drop_attachments(origin.pid, address.ring)
        name = origin.pid, address.inode
        if name not in self._attachments:
            self._attachments[name] = _map(key, origin, address)
        return self._attachments[name]

    def _drop_attachments(self, pid: int, ring: frozenset[int]) -> None:
        """Release mappings of segments that the publisher `pid` has dropped, and those of publishers that are gone."""
        for name in list(self._attachments):
            is_dropped = name[1] not in ring if name[0] == pid else not os.path.exists(f"/proc/{name[0]}")
            if is_dropped:
                attachment = self._attachments.pop(name)
                if not attachment.holds:
                    attachment.close()

    async def close(self) -> None:
        """See `TransportReader`. Segments that are being read are released afterwards."""
        with self._lock:
            for attachment in self._attachments.values():
                if not attachment.holds:
                    attachment.close()
            self._attachments.clear()


def _map(key: Key, origin: Origin, address: SegmentAddress) -> _Attachment:
    try:
        return _Attachment(*map_segment(origin.pid, address.fd, address.nbytes))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot map {key_text(key)} of process {origin.pid}: {error}") from error


def make_overwritten_error(key: Key) -> SnapshotOverwrittenError:
    """Return the error of a reader whose snapshot was overwritten."""
    return SnapshotOverwrittenError(
        f"{key_text(key)} has been overwritten by a newer one; hold a snapshot (WeightStore.open) while it is read"
    )
