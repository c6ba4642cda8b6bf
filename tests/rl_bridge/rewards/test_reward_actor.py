"""Rewards as services on real Monarch: a killed actor takes its processes along and costs no reward."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from serve_process import gone
from serving import eventually as until

from rl_bridge.config import RewardConfig
from rl_bridge.errors import RewardError

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300), pytest.mark.usefixtures("importable_modules")]

HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def settings(*functions: str, timeout_s: float = HANG_S) -> RewardConfig:
    names = tuple(f"reward_functions.{name}" for name in functions)
    return RewardConfig(function=names, workers=2, timeout_seconds=timeout_s)


async def test_service_evaluates_and_reports_what_functions_do_wrong(tmp_path: Path) -> None:
    from rl_bridge.rewards.actor import RewardActor
    from rl_bridge.services.fleet import Fleet

    async with Fleet(tmp_path / "logs"), asyncio.timeout(2 * HANG_S):
        with pytest.raises(RewardError, match="module 'reward_functions' has no 'absent'"):
            await RewardActor.options(name="absent").as_service(settings("absent"))
        several = await RewardActor.options(name="several").as_service(settings("exact", "none", "half"))
        assert await several.evaluate_response.route(prompt="2 + 2?", response="4", target="4") == 0.75
        assert await several.evaluate_response.route(prompt="2 + 2?", response="5", target="4") == 0.25
        reward = await RewardActor.options(name="reward").as_service(
            settings("compute_reward", timeout_s=5.0)
        )
        with pytest.raises(RewardError, match="the answer '7' is not one"):
            await reward.evaluate_response.route(prompt="", response="raise", target="7")
        target = str(tmp_path / "pid")
        assert (
            await reward.evaluate_response.route(prompt="", response="say_and_sleep", target=target) is None
        )
        # None of this is a lost replica.
        assert [replica.restarts for replica in reward.replicas] == [0]


async def test_a_kill_costs_nobody_a_reward_and_leaves_nothing(tmp_path: Path) -> None:
    from rl_bridge.rewards.actor import RewardActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy

    async with Fleet(tmp_path / "logs"), asyncio.timeout(2 * HANG_S):
        service = RewardActor.options(
            name="reward", num_replicas=2, restarts=RestartPolicy(budget=3, backoff_s=0.0)
        )
        reward = await service.as_service(settings("compute_reward"))
        file = tmp_path / "pids"
        asking: Any = asyncio.ensure_future(
            reward.evaluate_response.route(prompt="", response="hold_once", target=str(file))
        )
        await until(file.exists)
        first = [int(word) for word in file.read_text().split()]
        guard = psutil.Process(first[0]).ppid()
        os.kill(psutil.Process(guard).ppid(), signal.SIGKILL)
        # It is evaluated again, by the other replica.
        assert await asking == 1.0
        await until(lambda: all(map(gone, [*first, guard])))
        rest = [reward.evaluate_response.route(prompt="", response="return", target=2) for _ in range(20)]
        assert await asyncio.gather(*rest) == [2.0] * 20
        await until(lambda: sum(r.restarts for r in reward.replicas) == 1)
