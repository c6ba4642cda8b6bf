"""The transport between machines: Monarch's RDMA buffers, over TCP without RDMA hardware.

Readers fetch into their own memory. Publishers do not wait for them: a snapshot that was overwritten meanwhile is
rejected.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from rl_bridge.errors import MissingDependencyError, WeightsError
from rl_bridge.weights.directory import WeightDirectory
from rl_bridge.weights.local import Needed, SegmentPublisher, allocate_memory, make_overwritten_error
from rl_bridge.weights.segments import Segment
from rl_bridge.weights.snapshot import Snapshot, StoredPart, key_text

try:
    from monarch.rdma import RDMAAction, RDMABuffer
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error

DROP_TIMEOUT_S = 30.0


class BufferPublisher(SegmentPublisher):
    """The sending side: segments whose parts are registered as RDMA buffers."""

    def __init__(self, *, depth: int, timeout_s: float) -> None:
        super().__init__(depth=depth, timeout_s=timeout_s)
        self._buffers: dict[Segment, dict[str, RDMABuffer]] = {}
        self._layouts: dict[Segment, dict[str, tuple[int, int]]] = {}

    async def _address(self, segment: Segment, parts: Mapping[str, StoredPart]) -> dict[str, RDMABuffer]:
        layout = {name: (part.offset, part.nbytes) for name, part in parts.items() if part.nbytes}
        if layout != self._layouts.get(segment):
            await asyncio.to_thread(self._register, segment, layout)
        return self._buffers[segment]

    def _register(self, segment: Segment, layout: dict[str, tuple[int, int]]) -> None:
        self._release_resources(segment)
        data = torch.frombuffer(segment.map, dtype=torch.uint8)
        self._buffers[segment] = {name: RDMABuffer(data[a : a + n]) for name, (a, n) in layout.items()}
        self._layouts[segment] = layout

    def _release_resources(self, segment: Segment) -> None:
        self._layouts.pop(segment, None)
        try:
            for buffer in self._buffers.pop(segment, {}).values():
                buffer.drop().get(timeout=DROP_TIMEOUT_S)
        except TimeoutError as error:
            raise WeightsError(
                f"expected Monarch to release a buffer of weights within {DROP_TIMEOUT_S:g} s, it did not"
            ) from error


class BufferReader:
    """The receiving side; a transfer may take `timeout_s`."""

    def __init__(self, directory: WeightDirectory, *, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._buffers_by_rank: dict[int, Tensor] = {}

    @asynccontextmanager
    async def hold(self, snapshot: Snapshot, needed: Needed) -> AsyncIterator[dict[int, Tensor]]:
        """See `TransportReader`. The bytes are fetched into this process's memory, which is reused."""
        buffers, self._buffers_by_rank = self._buffers_by_rank, {}
        fetched: dict[int, Tensor] = {}
        fetch = RDMAAction()
        for rank, names in needed.items():
            contribution = snapshot.contributions[rank]
            assert isinstance(contribution.location, dict)
            nbytes = max(part.offset + part.nbytes for part in contribution.parts.values())
            data = buffers.get(rank)
            fetched[rank] = data = allocate_memory(nbytes) if data is None or len(data) < nbytes else data
            for name in names:
                part = contribution.parts[name]
                if part.nbytes:
                    target = data[part.offset : part.offset + part.nbytes]
                    fetch.read_remote(target, contribution.location[name])
        if fetched:
            await self._fetch(snapshot, fetch)
        try:
            yield fetched
        finally:
            self._buffers_by_rank = fetched

    async def _fetch(self, snapshot: Snapshot, fetch: RDMAAction) -> None:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await fetch.submit(timeout=max(1, int(self._timeout_s)))
        except Exception as error:  # Monarch raises no narrower type
            failure = error
        if not await self._directory.is_current(snapshot.key, snapshot.publication):
            raise make_overwritten_error(snapshot.key)
        if failure is not None:
            ranks = ", ".join(str(contribution.origin.pid) for contribution in snapshot.contributions)
            raise WeightsError(
                f"cannot fetch {key_text(snapshot.key)} within {self._timeout_s:g} s from process {ranks}: {failure}; "
                "is it alive, and the network up? A slow network needs a higher trainer.timeout_s"
            ) from failure

    async def close(self) -> None:
        """See `TransportReader`."""
        self._buffers_by_rank.clear()
