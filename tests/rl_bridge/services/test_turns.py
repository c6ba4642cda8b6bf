"""Turns on a GPU: one process has it at a time, and the kernel takes it back from one that dies."""

import asyncio
import sys

import pytest

from rl_bridge.errors import RoleError
from rl_bridge.services.options import RUN_VARIABLE, START_VARIABLE, Turn, start_of

WAIT_S = 30.0
TAKES_IT = """
import asyncio, sys
from rl_bridge.services.options import Turn
turn = Turn()
asyncio.run(turn.take(30.0))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _on_two_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv(RUN_VARIABLE, request.node.name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")


async def test_turn_is_had_by_one_at_a_time() -> None:
    first, second = Turn(), Turn()
    await first.take(WAIT_S)
    await first.take(WAIT_S)  # who has it need not wait
    waiting = asyncio.ensure_future(second.take(WAIT_S))
    await asyncio.sleep(0.1)
    assert (first.held, second.held, waiting.done()) == (True, False, False)
    first.give_back()
    await waiting
    with pytest.raises(RoleError, match=r"a turn on the GPU .* within 0\.05 s, another process has it"):
        await first.take(0.05)
    assert (first.held, second.held) == (False, True)
    second.give_back()
    await first.take(WAIT_S)
    first.give_back()


async def test_overlapping_gpus_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Turn()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    one, again = Turn(), Turn()
    await one.take(WAIT_S)
    with pytest.raises(RoleError):
        await both.take(0.05)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    other = Turn()
    await other.take(WAIT_S)  # what was had of it meanwhile has been given back
    other.give_back()
    one.give_back()
    await again.take(WAIT_S)
    again.give_back()


async def test_without_gpus_a_rank_takes_turns_with_the_generator_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def of(replica: int, rank: int) -> Turn:
        monkeypatch.setenv(START_VARIABLE, start_of(replica, rank, 0))
        return Turn()

    ranks, generators = [of(0, 0), of(0, 1)], [of(0, 0), of(1, 0)]
    for rank in ranks:
        await rank.take(WAIT_S)
    ranks[1].give_back()
    await generators[1].take(WAIT_S)
    with pytest.raises(RoleError):
        await generators[0].take(0.05)
    for turn in (ranks[0], generators[1]):
        turn.give_back()


async def test_turn_of_a_process_that_is_killed_is_free() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TAKES_IT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"has it\n"
        turn = Turn()
        with pytest.raises(RoleError):
            await turn.take(0.05)
    finally:
        process.kill()
        await process.wait()
    await turn.take(WAIT_S)
    turn.give_back()
