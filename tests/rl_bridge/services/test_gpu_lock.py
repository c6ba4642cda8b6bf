"""Turns on a GPU: one process has it at a time, and the kernel takes it back from one that dies."""

import asyncio
import sys

import pytest

from rl_bridge.errors import RoleError
from rl_bridge.services.own_process import RUN_VARIABLE, START_VARIABLE, GpuLock, start_of

WAIT_S = 30.0
TAKES_IT = """
import asyncio, sys
from rl_bridge.services.own_process import GpuLock
lock = GpuLock()
asyncio.run(lock.acquire(30.0))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _on_two_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv(RUN_VARIABLE, request.node.name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")


async def test_turn_is_had_by_one_at_a_time() -> None:
    first, second = GpuLock(), GpuLock()
    await first.acquire(WAIT_S)
    await first.acquire(WAIT_S)  # who has it need not wait
    waiting = asyncio.ensure_future(second.acquire(WAIT_S))
    await asyncio.sleep(0.1)
    assert (first.held, second.held, waiting.done()) == (True, False, False)
    first.release()
    await waiting
    with pytest.raises(RoleError, match=r"a turn on the GPU .* within 0\.05 s, another process has it"):
        await first.acquire(0.05)
    assert (first.held, second.held) == (False, True)
    second.release()
    await first.acquire(WAIT_S)
    first.release()


async def test_who_waits_for_one_gpu_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a trainer has one GPU, and the first to have it waits for the others."""
    generator, ranks = GpuLock(), list[GpuLock]()
    for gpu in ("1", "3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        ranks.append(GpuLock())
    await ranks[0].acquire(WAIT_S)
    waiting = asyncio.ensure_future(generator.acquire(WAIT_S))
    await asyncio.sleep(0.1)
    await ranks[1].acquire(WAIT_S)  # the generator looks for this one first
    for rank in ranks:
        assert not waiting.done()
        rank.release()
    await waiting
    generator.release()


async def test_without_gpus_a_rank_takes_turns_with_the_generator_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def of(replica: int, rank: int) -> GpuLock:
        monkeypatch.setenv(START_VARIABLE, start_of(replica, rank, 0))
        return GpuLock()

    ranks, generators = [of(0, 0), of(0, 1)], [of(0, 0), of(1, 0)]
    for rank in ranks:
        await rank.acquire(WAIT_S)
    ranks[1].release()
    await generators[1].acquire(WAIT_S)
    with pytest.raises(RoleError):
        await generators[0].acquire(0.05)
    for lock in (ranks[0], generators[1]):
        lock.release()


async def test_turn_of_a_process_that_is_killed_is_free() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TAKES_IT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"has it\n"
        lock = GpuLock()
        with pytest.raises(RoleError):
            await lock.acquire(0.05)
    finally:
        process.kill()
        await process.wait()
    await lock.acquire(WAIT_S)
    lock.release()
