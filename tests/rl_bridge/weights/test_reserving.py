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
    threads: list[threading.Thread] = []

    def slowly(ring: SegmentRing, nbytes: int) -> object:
        threads.append(threading.current_thread())
        began.set()
        assert threads[-1] is not here  # or nothing could let it end
        assert may_end.wait(WAIT_S)
        return reserve(ring, nbytes)

    monkeypatch.setattr(SegmentRing, "reserve", slowly)
    publisher = local.SegmentPublisher(depth=2, timeout_s=WAIT_S)
    publishing = asyncio.ensure_future(publisher.reserve(1, (0, 0), 4096))  # type: ignore[arg-type]
    assert await asyncio.to_thread(began.wait, WAIT_S)
    # What nobody waits for any more is the next one's.
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    may_end.set()
    for _ in range(3):
        slot = await publisher.reserve(2, (0, 0), 4096)  # type: ignore[arg-type]
        slot.release()
    assert len(publisher.inodes()) == 2
    await publisher.close()
