"""Reward functions in real processes, really killed: nothing waits, nothing stays, nothing is scored by accident."""

import asyncio
import errno
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_process import gone
from serving import eventually as until

from rl_bridge.config import RewardConfig
from rl_bridge.errors import RewardError
from rl_bridge.rewards import pool as pool_module
from rl_bridge.rewards._worker import LENGTH, STARTED, RewardReply
from rl_bridge.rewards.pool import RewardPool, RewardWorker

pytestmark = pytest.mark.usefixtures("importable_modules")

HANG_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def open_pool(
    function: str = "reward_functions.compute_reward",
    *,
    workers: int = 2,
    timeout_s: float = HANG_S,
    **options: Any,
) -> RewardPool:
    reward = RewardConfig(function=(function,), workers=workers, timeout_seconds=timeout_s, **options)
    return RewardPool(reward)


async def ask(pool: RewardPool, response: str, target: Any = None) -> float | None:
    async with asyncio.timeout(HANG_S):
        return await pool.evaluate(prompt="what?", response=response, target=target)


async def pids_in(file: Path) -> list[int]:
    await until(file.exists)
    return [int(word) for word in file.read_text().split()]  # noqa: ASYNC240


def guards() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "guard.py" in " ".join(child.cmdline())]


async def test_rewards_come_back_whatever_kind_of_number_they_are() -> None:
    async with open_pool() as pool:
        values = [1, 0.5, True, "fraction", None, -3]
        got = await asyncio.gather(*(ask(pool, "return", value) for value in values))
        assert got == [1.0, 0.5, 1.0, 0.25, None, -3.0]
        assert (pool.counts["scored"], pool.counts["unscored"], pool.counts["retried"]) == (5, 1, 0)
        # What is no number is the function's mistake.
        for wrong in ("nan", "inf", "list", "text"):
            with pytest.raises(RewardError, match=r"to return a finite number or None, got"):
                await ask(pool, "return", wrong)
        # Workers are kept: none of this has cost one.
        assert (pool.counts["workers_started"], pool.counts["workers_lost"]) == (2, 0)


async def test_worker_is_ours_and_its_function_may_be_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rl_bridge").mkdir()
    (tmp_path / "rl_bridge" / "__init__.py").write_text("raise RuntimeError('this folder is not Ropewalk')")
    (tmp_path / "mine.py").write_text("def reward(prompt, response, target): return 0.5")
    monkeypatch.chdir(tmp_path)
    async with open_pool("mine.reward", workers=1) as pool:
        assert await ask(pool, "") == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["start_daemons", pytest.param("backtrack", marks=pytest.mark.soak)])
async def test_slow_function_is_killed_with_all_processes_it_started(way: str, tmp_path: Path) -> None:
    async with open_pool(workers=1, timeout_s=5.0) as pool:
        assert await ask(pool, way, str(tmp_path / "pids")) is None
        pids = await pids_in(tmp_path / "pids")
        assert len(pids) == (4 if way == "start_daemons" else 1)
        await until(lambda: all(map(gone, pids)))
        assert pool.counts["timed_out"] == 1
        # The next one finds another process.
        assert await ask(pool, "return", 1) == 1.0
        assert (pool.counts["workers_started"], pool.counts["workers_lost"], pool.counts["lost"]) == (2, 0, 0)


@pytest.mark.slow
async def test_a_killed_process_costs_nobody_a_reward(tmp_path: Path) -> None:
    async with open_pool() as pool:
        # While it evaluates: it is tried again in another.
        assert await ask(pool, "die_once", str(tmp_path / "died")) == 1.0
        # While nobody uses it.
        await until(lambda: pool.counts["workers_started"] == 3)
        assert len(pool.pids) == 2
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*(ask(pool, "return", 1) for _ in range(4))) == [1.0] * 4
        assert pool.counts["lost"] == 0
        assert pool.counts["workers_lost"] == 3
        # One that kills whatever evaluates it is left out, and counted as infrastructure's failure.
        assert await ask(pool, "die") is None
        assert (pool.counts["lost"], pool.counts["scored"]) == (1, 5)
        assert await ask(pool, "return", 1) == 1.0


@pytest.mark.slow
async def test_a_function_that_raises_ends_the_run_once_it_is_clear_that_it_is_the_function(
    tmp_path: Path,
) -> None:
    async with open_pool() as pool:
        assert await ask(pool, "raise_once", str(tmp_path / "raised")) == 1.0
        assert (pool.counts["retried"], pool.counts["raised"]) == (1, 0)
        with pytest.raises(
            RewardError, match=r"(?s)compute_reward' raised:.*do_raise.*'7' is not one.*reward\.drop"
        ):
            await ask(pool, "raise", "7")
        with pytest.raises(RewardError, match="SystemExit"):
            await ask(pool, "exit", 3)
        assert (pool.counts["raised"], pool.counts["workers_started"]) == (2, 2)
    async with open_pool(drop_failures=True) as pool:
        assert await ask(pool, "raise", "7") is None
        assert await ask(pool, "return", "nan") is None
        assert pool.counts["raised"] == 2


async def test_a_cancelled_caller_leaves_no_process_behind_and_takes_no_slot_along(tmp_path: Path) -> None:
    async with open_pool(workers=1) as pool:
        held = asyncio.ensure_future(ask(pool, "say_and_sleep", str(tmp_path / "pid")))
        (pid,) = await pids_in(tmp_path / "pid")
        waiting = asyncio.ensure_future(ask(pool, "return", 1))
        given_up = asyncio.ensure_future(ask(pool, "return", 2))
        await asyncio.sleep(0.01)
        given_up.cancel()
        held.cancel()
        assert await waiting == 1.0
        await until(lambda: gone(pid))
        assert pool.counts["scored"] == 1
        # Nor one that is cancelled when a process has just been given to it.
        worker = await pool._acquire_worker()
        served = asyncio.ensure_future(ask(pool, "return", 3))
        await asyncio.sleep(0)
        pool._release_worker(worker)
        served.cancel()
        assert await ask(pool, "return", 4) == 4.0


async def test_process_that_had_ended_before_it_began_is_not_the_functions_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[Exception] = [BrokenPipeError(), ConnectionResetError(), BrokenPipeError()]
    request = RewardWorker.request

    async def end_first(self: RewardWorker, content: bytes, timeout_s: float) -> RewardReply:
        if errors:
            raise errors.pop()
        return await request(self, content, timeout_s)

    monkeypatch.setattr(RewardWorker, "request", end_first)
    async with open_pool() as pool:
        assert await ask(pool, "return", 1) == 1.0
        assert (pool.counts["workers_lost"], pool.counts["lost"]) == (3, 0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("reward_functions.absent", r"reward\.function: module 'reward_functions' has no 'absent'"),
        ("reward_functions:one_argument", r"reward\.function=reward_functions:one_argument"),
        ("lasting.f", r"within 1 s.*raise reward\.start_timeout_seconds,"),
    ],
)
async def test_invalid_reward_function_is_refused_at_the_start(function: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        async with open_pool(function, start_timeout_seconds=1.0 if "lasting" in function else HANG_S):
            pytest.fail("it was started")
    assert guards() == []


async def test_a_machine_without_room_for_a_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(functions: Sequence[str]) -> Any:
        if attempts.append(1) or len(attempts) <= 5:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return spawn(functions)

    attempts, spawn = list[int](), pool_module._spawn
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.01)
    async with open_pool(workers=1) as pool:
        monkeypatch.setattr(pool_module, "_spawn", no_room)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await ask(pool, "return", 1) == 1.0
    assert len(attempts) == 6


@pytest.mark.soak
async def test_a_pool_that_can_have_no_processes_any_more_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.01)
    module = tmp_path / "vanishing.py"
    module.write_text("def f(prompt, response, target):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    async with open_pool("vanishing.f", workers=1) as pool:
        assert await ask(pool, "x") == 1.0
        module.unlink()
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(
            RewardError, match=r"expected another process for reward functions, got: .*vanishing"
        ):
            await ask(pool, "x")


async def test_closed_pool_fails_all_waiting_calls(tmp_path: Path) -> None:
    pool = open_pool(workers=1)
    async with pool:
        held = asyncio.ensure_future(ask(pool, "say_and_sleep", str(tmp_path / "pid")))
        (pid,) = await pids_in(tmp_path / "pid")
        waiting = asyncio.ensure_future(ask(pool, "return", 1))
        await asyncio.sleep(0.01)
    for task in (held, waiting):
        with pytest.raises(RewardError, match="got one that was closed"):
            await task
    assert gone(pid)
    await until(lambda: not pool._renewals)
    assert pool.pids == []
    assert guards() == []


async def test_a_killed_guard_costs_no_reward_and_leaves_nothing_of_the_workers_group(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with open_pool(workers=1) as pool:
        asking = asyncio.ensure_future(ask(pool, "hold_once", str(file)))
        worker, child, *apart = await pids_in(file)
        try:
            os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
            assert (await asking) == 1.0
            await until(lambda: gone(worker) and gone(child))
        finally:
            for pid in apart:  # what has left the group was the guard's to find
                os.kill(pid, signal.SIGKILL)


OWNER = """
import asyncio, sys
from rl_bridge.config import RewardConfig
from rl_bridge.rewards.pool import RewardPool

async def main():
    reward = RewardConfig(function="reward_functions.compute_reward", workers=1, timeout_seconds=600)
    async with RewardPool(reward) as pool:
        await pool.evaluate(prompt="", response="start_daemons", target=sys.argv[1])

asyncio.run(main())
"""


@pytest.mark.soak
async def test_nothing_outlives_the_process_that_owns_the_pool(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "pids")]) as owner:  # noqa: ASYNC220
        pids = await pids_in(tmp_path / "pids")
        guard = psutil.Process(pids[0]).ppid()
        owner.kill()
    await until(lambda: all(map(gone, [*pids, guard])))


@pytest.mark.soak
async def test_pool_keeps_its_size_through_random_failures(tmp_path: Path) -> None:
    """Everything at once, drawn from a seed: as many processes as ever evaluate when it is over."""
    draw = random.Random(7)
    async with open_pool(workers=3, timeout_s=0.3) as pool:

        async def one(number: int) -> str:
            kind = draw.choice([*["return"] * 3, "raise", "die", "say_and_sleep", "cancel", "shot"])
            response = {"cancel": "say_and_sleep", "shot": "return"}.get(kind, kind)
            task = asyncio.ensure_future(ask(pool, response, str(tmp_path / str(number))))
            await asyncio.sleep(draw.random() * 0.1)
            if kind == "cancel":
                task.cancel()
            if kind == "shot" and pool.pids:
                with suppress(ProcessLookupError):  # it was shot before
                    os.kill(draw.choice(pool.pids), signal.SIGKILL)
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            return outcome if isinstance(outcome, str) else type(outcome).__name__

        async with asyncio.timeout(2 * HANG_S):
            await asyncio.gather(*(one(number) for number in range(60)))
            await until(lambda: len(pool.pids) == 3 and not pool._renewals)
        assert len(pool._idle) == 3
        assert not pool._waiters
        # From here on nothing is meant to take too long.
        pool._reward = pool._reward.model_copy(update={"timeout_seconds": HANG_S})
        assert len(set(await asyncio.gather(*(ask(pool, "pid") for _ in range(30))))) == 3
    assert guards() == []


async def test_a_reply_that_came_in_time_counts_when_this_process_wakes_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, suspended_s = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + suspended_s)
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        guard = subprocess.Popen(["true"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        worker = RewardWorker(guard, reader, writer)
        asked = asyncio.ensure_future(worker.request(b"?", timeout_s=HANG_S))
        for _ in range(3):
            await asyncio.sleep(0)
        for frame in (STARTED, RewardReply(reward=0.5).encode()):
            theirs.sendall(LENGTH.pack(len(frame)) + frame)
        suspended_s = 2 * HANG_S
        assert (await asked).reward == 0.5
        await worker.kill()
