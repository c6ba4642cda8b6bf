"""The transport between machines: Monarch's RDMA buffers, over TCP where there is no such hardware.

Readers fetch into memory of their own, so what a publisher has is read for the length of a transfer alone.
For that long readers keep a lease, which ends by itself: the death of a process elsewhere is told by nobody.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_bridge.errors import MissingDependencyError, WeightsError
from rl_bridge.weights.directory import Directory
from rl_bridge.weights.segments import EXTRA_SEGMENTS
from rl_bridge.weights.snapshot import Key, Publication, Snapshot, StoredPart, key_text
from rl_bridge.weights.transport import Needed, under_lease

try:
    from monarch.rdma import RDMAAction, RDMABuffer
except ModuleNotFoundError as missing:
    raise MissingDependencyError("torchmonarch") from missing

POLL_INTERVAL_S = 0.05
"""How often a publisher asks whether a reader has let go."""
DROP_TIMEOUT_S = 30.0
"""To give up one buffer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferAddress:
    """Where readers find what was written into a block: a buffer for each part that is not empty."""

    buffers: Mapping[str, RDMABuffer]


@dataclass(slots=True, eq=False)
class _Block:
    """Memory that is written once for each snapshot, and registered for others to read.

    Attributes:
        target: The memory.
        holds: What is in it.
        written: Grows with every writing. 0: nothing that is whole.
        layout: What the buffers were made for.
        reserved: A writer has it.
    """

    target: Tensor
    holds: tuple[Key, Publication] | None = None
    written: int = 0
    layout: dict[str, tuple[int, int]] = field(default_factory=dict)
    buffers: dict[str, RDMABuffer] = field(default_factory=dict)
    reserved: bool = True

    def register(self, parts: Mapping[str, StoredPart]) -> None:
        """Make the buffers, unless they are those of the last time."""
        layout = {name: (part.offset, part.nbytes) for name, part in parts.items() if part.nbytes}
        if layout != self.layout:
            self.forget()
            self.buffers = {name: RDMABuffer(self.target[a : a + n]) for name, (a, n) in layout.items()}
            self.layout = layout

    def forget(self) -> None:
        """Give the buffers up, and with them what Monarch holds the memory by.

        Raises:
            WeightsError: Monarch does not.
        """
        buffers, self.buffers, self.layout = self.buffers, {}, {}
        try:
            for buffer in buffers.values():
                buffer.drop().get(timeout=DROP_TIMEOUT_S)
        except TimeoutError as error:
            raise WeightsError(
                f"expected Monarch to give a buffer of weights up within {DROP_TIMEOUT_S:g} s, it has not"
            ) from error


class BufferSlot:
    """A block, as a `SnapshotSlot`."""

    def __init__(
        self, publisher: "BufferPublisher", block: _Block, key: Key, publication: Publication
    ) -> None:
        self._publisher = publisher
        self._block = block
        self._name = key, publication
        self.replaces = None if block.holds is None else block.holds[0]
        block.holds, block.written = None, 0
        self.target = block.target

    async def publish(self, parts: Mapping[str, StoredPart]) -> BufferAddress:
        """See `SnapshotSlot`."""
        await asyncio.to_thread(self._block.register, parts)
        self._block.holds = self._name
        self._block.written = self._publisher.count()
        return BufferAddress(buffers=dict(self._block.buffers))

    def release(self) -> None:
        """See `SnapshotSlot`."""
        self._block.reserved = False


class BufferPublisher:
    """The sending side between machines.

    Args:
        directory: Knows who reads what.
        depth: Versions that stay readable at once.
        timeout_s: How long to wait for readers of what is to be overwritten: as long as these may take, since one
            that is gone is in the way no longer than its lease lasts.
    """

    header = 0

    def __init__(self, directory: Directory, *, depth: int, timeout_s: float) -> None:
        self._directory = directory
        self._depth = depth
        self._timeout_s = timeout_s
        self._rings: dict[str | None, list[_Block]] = {}
        self._written = 0

    def count(self) -> int:
        """The number of the snapshot that has just been written."""
        self._written += 1
        return self._written

    async def reserve(self, key: Key, publication: Publication, nbytes: int) -> BufferSlot:
        """See `Publisher`."""
        ring = self._rings.setdefault(key if isinstance(key, str) else None, [])
        deadline = time.monotonic() + self._timeout_s
        while True:
            block, holders = await self._free(ring, nbytes)
            if block is not None:
                return BufferSlot(self, block, key, publication)
            if time.monotonic() > deadline:
                raise WeightsError(
                    f"expected one of {len(ring)} blocks to be free for {key_text(key)} within "
                    f"{self._timeout_s:g} s, but the older ones are being read, by {', '.join(holders)}; "
                    "a connection that is slow or cut is the usual cause"
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _free(self, ring: list[_Block], nbytes: int) -> tuple[_Block | None, list[str]]:
        """A block to write into; or who is in the way."""
        by_age = sorted(ring, key=lambda block: block.written)
        in_the_way: list[str] = []
        for block in by_age[: max(0, len(by_age) - (self._depth - 1))]:
            if block.reserved:
                continue
            block.reserved = True
            try:
                holders = [] if block.holds is None else await self._directory.retire(*block.holds)
                if not holders:
                    await self._enlarge(block, nbytes)
                    return block, []
            except BaseException:
                block.reserved = False
                raise
            block.reserved = False
            in_the_way += holders
        if len(ring) >= self._depth + EXTRA_SEGMENTS:
            return None, in_the_way
        block = _Block(_memory(nbytes))
        ring.append(block)
        return block, []

    async def _enlarge(self, block: _Block, nbytes: int) -> None:
        if len(block.target) < nbytes:
            await asyncio.to_thread(block.forget)
            block.target = _memory(nbytes)

    async def close(self) -> None:
        """See `Publisher`."""
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            for block in ring:
                await asyncio.to_thread(block.forget)


class BufferReader:
    """The receiving side between machines.

    Args:
        directory: Knows who reads what.
        timeout_s: How long a transfer may take.
    """

    def __init__(self, directory: Directory, *, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._kept: dict[int, Tensor] = {}

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[dict[int, Tensor]]:
        """See `TransportReader`. The bytes are fetched into memory of this process, kept for the next time."""
        kept, self._kept = self._kept, {}
        fetched: dict[int, Tensor] = {}
        fetch = RDMAAction()
        for rank, names in needed.items():
            contribution = snapshot.contributions[rank]
            address = contribution.location
            assert isinstance(address, BufferAddress)
            nbytes = max(part.offset + part.nbytes for part in contribution.parts.values())
            data = kept.get(rank)
            fetched[rank] = data = _memory(nbytes) if data is None or len(data) < nbytes else data
            for name in names:
                part = contribution.parts[name]
                if part.nbytes:
                    fetch.read_remote(data[part.offset : part.offset + part.nbytes], address.buffers[name])
        if fetched:
            await self._fetch(snapshot, fetch)
        try:
            yield fetched
        finally:
            self._kept = fetched

    async def _fetch(self, snapshot: Snapshot, fetch: RDMAAction) -> None:
        async def transfer() -> None:
            async with asyncio.timeout(self._timeout_s):
                await fetch.submit(timeout=max(1, int(self._timeout_s)))

        try:
            await under_lease(self._directory, snapshot, f"{self._holder} ({secrets.token_hex(4)})", transfer)
        except WeightsError:
            raise  # of the lease: what has been overwritten is looked up anew
        except Exception as error:  # Monarch raises nothing narrower
            ranks = ", ".join(str(contribution.origin.pid) for contribution in snapshot.contributions)
            raise WeightsError(
                f"cannot fetch {key_text(snapshot.key)} within {self._timeout_s:g} s from process {ranks}: {error}; "
                "does it live, and does the network between? A slow one needs a higher trainer.timeout_s"
            ) from error

    async def close(self) -> None:
        """See `TransportReader`."""
        self._kept.clear()


def _memory(nbytes: int) -> Tensor:
    try:
        return torch.empty(max(1, nbytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise WeightsError(f"cannot reserve {nbytes} bytes: {error}") from error
