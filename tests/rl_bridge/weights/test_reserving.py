"""Memory for a snapshot is gigabytes, and whoever else has work in the process shall not wait for it."""

import asyncio
import ctypes
import threading
from types import SimpleNamespace

import pytest

from rl_bridge.weights import local
from rl_bridge.weights.segments import Segment, SegmentRing

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


@pytest.mark.parametrize("refused", [0, 1])
def test_segment_beside_a_gpu_is_page_locked_for_as_long_as_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Of CUDA this asks for nothing but the two calls, which a machine without a GPU cannot make."""
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        ctypes.memset(address, 1, nbytes)  # it is mapped
        if not refused:
            locked[address] = nbytes
        return refused

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    segment = Segment(4096)
    assert list(locked.values()) == [4096][refused:]
    segment.close()
    assert locked == {}
