"""Memory for a snapshot is gigabytes, and whoever else has work in the process shall not wait for it."""

import asyncio
import threading

import pytest

from rl_bridge.weights import local
from rl_bridge.weights.segments import SegmentRing

WAIT_S = 30.0


async def test_a_first_push_reserves_memory_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    here, began, may_end = threading.current_thread(), threading.Event(), threading.Event()
    reserve = SegmentRing.reserve
    rings: list[SegmentRing] = []

    def slowly(ring: SegmentRing, nbytes: int, busy: frozenset[object]) -> object:
        rings.append(ring)
        began.set()
        assert threading.current_thread() is not here  # or nothing could let it end
        assert may_end.wait(WAIT_S)
        return reserve(ring, nbytes, busy)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentRing, "reserve", slowly)
    publisher = local.SegmentPublisher(depth=2, timeout_s=WAIT_S)

    async def publish(version: int) -> None:
        async with publisher.reserve(version, (0, 0), 4096):
            pass

    publishing = asyncio.ensure_future(publish(1))
    assert await asyncio.to_thread(began.wait, WAIT_S)
    # What nobody waits for any more is the next one's.
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    may_end.set()
    for version in (2, 3, 4):
        await publish(version)
    assert len(rings[0].segments) <= 2
    await publisher.close()
