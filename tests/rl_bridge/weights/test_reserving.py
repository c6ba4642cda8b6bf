"""Reserving gigabytes for a snapshot does not block other work of the process."""

import asyncio
import ctypes
import threading

import pytest

from rl_bridge.weights import local
from rl_bridge.weights.segments import Segment, SegmentRing

WAIT_S = 30.0


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_first_push_reserves_memory_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, cancelled: int
) -> None:
    here, began, may_end = threading.current_thread(), threading.Event(), threading.Event()
    reserve = SegmentRing.reserve
    rings: list[SegmentRing] = []

    def slowly(ring: SegmentRing, nbytes: int) -> object:
        rings.append(ring)
        began.set()
        assert threading.current_thread() is not here  # or nothing could let it end
        assert may_end.wait(WAIT_S)
        return reserve(ring, nbytes)

    monkeypatch.setattr(SegmentRing, "reserve", slowly)
    publisher = local.SegmentPublisher(depth=2, timeout_s=WAIT_S)

    async def publish(version: int) -> None:
        async with publisher.reserve(version, 0, 4096):
            pass

    publishing = asyncio.ensure_future(publish(1))
    assert await asyncio.to_thread(began.wait, WAIT_S)
    # What nobody waits for any more is the next one's.
    for _ in range(cancelled):  # whoever stops a run for good cancels once more
        publishing.cancel()
        await asyncio.sleep(0.01)
    may_end.set()
    await asyncio.gather(publishing, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        while not rings[0].segments or rings[0].segments[0].reserved:  # noqa: ASYNC110 - a thread does it
            await asyncio.sleep(0.01)
    assert [each.reserved for each in rings[0].segments] == [False]
    for version in (2, 3, 4):
        await publish(version)
    assert len(rings[0].segments) <= 2
    await publisher.close()


class FakeCuda:
    """The two calls that are made of CUDA, and its last error as torch reads it: after each kernel, and once."""

    def __init__(self, refused: int) -> None:
        self.locked: dict[int, int] = {}
        self._refused = refused
        self._last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        ctypes.memset(address, 1, nbytes)  # it is mapped
        if not self._refused:
            self.locked[address] = nbytes
        self._last_error = self._refused or self._last_error
        return self._refused

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802 - CUDA's name
        del self.locked[address]

    def launch_kernel(self, *shape: int, device: str = "cuda") -> None:
        error, self._last_error = self._last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.mark.parametrize("refused", [0, 1])
def test_segment_beside_a_gpu_is_page_locked_for_as_long_as_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    cuda = FakeCuda(refused)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cuda)
    monkeypatch.setattr("torch.ones", cuda.launch_kernel)
    segment = Segment(4096)
    assert list(cuda.locked.values()) == [4096][refused:]
    cuda.launch_kernel()  # what comes next is not told of the refusal
    segment.close()
    assert cuda.locked == {}
