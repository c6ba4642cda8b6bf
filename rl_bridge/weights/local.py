"""The transport for one machine: shared memory. Readers see the publisher's bytes without a copy."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.weights.attachments import Attachments
from rl_bridge.weights.segments import HEADER, Segment, SegmentAddress, SegmentRing
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart, key_text
from rl_bridge.weights.transport import Needed, Room


class SegmentPublisher:
    """The sending side of shared memory.

    Args:
        depth: Versions that stay readable at once.
        timeout_s: How long to wait for readers who hold what is to be overwritten.
    """

    header = HEADER
    POLL_INTERVAL_S: ClassVar[float] = 0.002
    """How often it is looked whether a reader has let go: the kernel tells nobody."""

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        self._depth = depth
        self._timeout_s = timeout_s
        # Versions follow one another; whoever publishes under a name means to keep it beside them.
        self._rings: dict[str | None, SegmentRing] = {}

    @asynccontextmanager
    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> AsyncIterator[Room]:
        """See `Publisher`."""
        name = key if isinstance(key, str) else None
        ring = self._rings.setdefault(name, SegmentRing(self._depth, closing=self._forget))
        segment = await self._wait_for_segment(ring, key, nbytes)
        held, segment.holds = segment.holds, None
        whole = False

        async def publish(parts: Mapping[str, StoredPart]) -> object:
            nonlocal whole
            segment.end()
            address = await self._address(segment, parts)
            segment.holds, whole = (key, publication), True
            return address

        segment.begin()  # fits no handle while it is being written
        room = Room(
            target=torch.frombuffer(segment.map, dtype=torch.uint8),
            replaces=None if held is None else held[0],
            publish=publish,
        )
        try:
            yield room
        finally:
            del room.target  # a mapping that is looked at cannot be closed
            ring.release(segment, whole=whole)

    async def _wait_for_segment(self, ring: SegmentRing, key: Key, nbytes: int) -> Segment:
        deadline = time.monotonic() + self._timeout_s
        while True:
            busy: dict[Segment, list[str]] = {}
            while (segment := await _reserve(ring, nbytes, busy)) is not None:
                try:
                    holders = await self._holders(segment)
                except BaseException:
                    ring.put_back(segment)
                    raise
                if not holders:
                    return segment
                busy[segment] = holders
                ring.put_back(segment)
            if time.monotonic() > deadline:
                readers = {f"process {pid}" for one in ring.segments for pid in one.readers()}
                named = sorted(readers.union(*busy.values())) or ["nobody known"]
                raise WeightsError(
                    f"expected one of {len(ring.segments)} segments to be free for {key_text(key)} within "
                    f"{self._timeout_s:g} s, but the older ones are being read, by {', '.join(named)}; "
                    "a reader that hangs while it holds a snapshot, or a slow connection, is the usual cause"
                )
            await asyncio.sleep(self.POLL_INTERVAL_S)

    async def _holders(self, segment: Segment) -> list[str]:
        """Who reads it, beside processes that have locked it."""
        return []

    async def _address(self, segment: Segment, parts: Mapping[str, StoredPart]) -> object:
        """Where readers find what has been written."""
        inodes = (one.inode for ring in self._rings.values() for one in ring.segments)
        return SegmentAddress(
            fd=segment.fd,
            inode=segment.inode,
            nbytes=segment.nbytes,
            generation=segment.generation,
            ring=frozenset(inodes),
        )

    def _forget(self, segment: Segment) -> None:
        """A segment is about to be closed."""

    async def close(self) -> None:
        """See `Publisher`. Readers that hold a segment keep what they hold."""
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            await asyncio.to_thread(ring.close)


async def _reserve(ring: SegmentRing, nbytes: int, busy: Mapping[Segment, object]) -> Segment | None:
    """In a thread: memory that nobody has touched takes its time. What it finds for nobody is put back."""
    reserving = asyncio.ensure_future(asyncio.to_thread(ring.reserve, nbytes, frozenset(busy)))
    try:
        return await asyncio.shield(reserving)
    except asyncio.CancelledError:
        reserving.add_done_callback(partial(_put_back, ring))
        raise


def _put_back(ring: SegmentRing, reserved: "asyncio.Future[Segment | None]") -> None:
    if (
        not reserved.cancelled()
        and reserved.exception() is None
        and (segment := reserved.result()) is not None
    ):
        ring.put_back(segment)


class SegmentReader:
    """The receiving side of shared memory."""

    def __init__(self) -> None:
        self._attachments = Attachments()

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[dict[int, Tensor]]:
        """See `TransportReader`. The bytes are the publishers' own, mapped for reading only."""
        with ExitStack() as held:
            found: dict[int, Tensor] = {}
            for rank in sorted(needed):
                contribution = snapshot.contributions[rank]
                address = contribution.location
                assert isinstance(address, SegmentAddress)
                found[rank] = held.enter_context(
                    self._attachments.hold(snapshot.key, contribution.origin, address)
                )
            yield found

    async def close(self) -> None:
        """See `TransportReader`."""
        self._attachments.close()
