"""The transport for one machine: shared memory. Readers see the publisher's bytes without a copy."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_bridge.errors import WeightsError
from rl_bridge.weights.attachments import Attachments
from rl_bridge.weights.segments import HEADER, Segment, SegmentAddress, SegmentRing
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart, key_text
from rl_bridge.weights.transport import Needed

POLL_INTERVAL_S = 0.002
"""How often a publisher looks whether a reader has let go: the kernel tells nobody."""


class SegmentSlot:
    """A locked segment, as a `SnapshotSlot`."""

    def __init__(self, publisher: "SegmentPublisher", ring: SegmentRing, segment: Segment, key: Key) -> None:
        self._publisher = publisher
        self._ring = ring
        self._segment = segment
        self._key = key
        self._whole = False
        self.replaces, segment.holds = segment.holds, None
        segment.begin()  # fits no handle while it is being written
        self.target = torch.frombuffer(segment.map, dtype=torch.uint8)

    async def publish(self, parts: Mapping[str, StoredPart]) -> SegmentAddress:
        """See `SnapshotSlot`."""
        segment = self._segment
        segment.end()
        segment.holds = self._key
        self._whole = True
        return SegmentAddress(
            fd=segment.fd,
            inode=segment.inode,
            nbytes=segment.nbytes,
            generation=segment.generation,
            ring=self._publisher.inodes(),
        )

    def release(self) -> None:
        """See `SnapshotSlot`."""
        del self.target  # a mapping that is looked at cannot be closed
        self._ring.release(self._segment, whole=self._whole)


class SegmentPublisher:
    """The sending side of shared memory.

    Args:
        depth: Versions that stay readable at once.
        timeout_s: How long to wait for readers who hold what is to be overwritten.
    """

    header = HEADER

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        self._depth = depth
        self._timeout_s = timeout_s
        # Versions follow one another; whoever publishes under a name means to keep it beside them.
        self._rings: dict[str | None, SegmentRing] = {}

    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> SegmentSlot:
        """See `Publisher`."""
        name = key if isinstance(key, str) else None
        ring = self._rings.setdefault(name, SegmentRing(self._depth))
        deadline = time.monotonic() + self._timeout_s
        while (segment := await _reserved(ring, nbytes)) is None:
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"expected one of {len(ring.segments)} segments to be free for {key_text(key)} within "
                    f"{self._timeout_s:g} s, but the older ones are being read, by process {_readers(ring)}; "
                    "a reader that hangs while it holds a snapshot is the usual cause"
                )
            await asyncio.sleep(POLL_INTERVAL_S)
        return SegmentSlot(self, ring, segment, key)

    def inodes(self) -> frozenset[int]:
        """Of all segments there are."""
        return frozenset(segment.inode for ring in self._rings.values() for segment in ring.segments)

    async def close(self) -> None:
        """See `Publisher`. Readers that hold a segment keep what they hold."""
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.close()


async def _reserved(ring: SegmentRing, nbytes: int) -> Segment | None:
    """A segment of the ring; in a thread, for a new one of gigabytes takes seconds."""
    reserving = asyncio.ensure_future(asyncio.to_thread(ring.reserve, nbytes))
    try:
        return await asyncio.shield(reserving)
    except asyncio.CancelledError:
        reserving.add_done_callback(partial(_give_back, ring))
        raise


def _give_back(ring: SegmentRing, reserved: "asyncio.Future[Any]") -> None:
    """Nobody will write into it: who reserved it has gone."""
    if reserved.cancelled() or reserved.exception() is not None or reserved.result() is None:
        return
    ring.release(reserved.result(), whole=False)


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


def _readers(ring: SegmentRing) -> str:
    pids = sorted({pid for segment in ring.segments for pid in segment.readers()})
    return ", ".join(map(str, pids)) or "unknown"
