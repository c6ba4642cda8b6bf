"""The synthetic job under a clock that jumps: what asynchrony gains, whatever the machine is doing."""

import asyncio
import statistics
from dataclasses import replace

import pytest

from rl_bridge.services.handle import LocalService
from rl_bridge.synthetic.job import StepTimes, SyntheticWorker, make_buffer, run_job
from rl_bridge.synthetic.settings import SyntheticSettings
from tests.support.simulated_time import simulate

SETTINGS = SyntheticSettings(iterations=12, group_size=4, train_s=0.75)


class Trainer:
    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self.trained: list[int] = []

    async def train_step(self, trajectories: int) -> None:
        self.trained.append(trajectories)
        await asyncio.sleep(self._settings.train_s)


def run(settings: SyntheticSettings) -> list[StepTimes]:
    async def job() -> list[StepTimes]:
        trainer = Trainer(settings)
        worker = LocalService(SyntheticWorker(replace(settings, workers=1)))
        clock = asyncio.get_running_loop().time
        steps = await run_job(settings, worker, LocalService(trainer), make_buffer(settings), clock=clock)
        assert trainer.trained == [settings.groups_per_batch * settings.group_size] * settings.iterations
        return steps

    return simulate(job())


def seconds(steps: list[StepTimes]) -> float:
    return sum(step.roll_s + step.train_s + step.sync_s for step in steps)


def test_asynchrony_gains_what_the_bound_allows_and_stays_within_its_own() -> None:
    synchronous = run(replace(SETTINGS, max_staleness=0))
    assert {step.staleness for step in synchronous} == {0}
    roll_s = statistics.mean(step.roll_s for step in synchronous)
    assert 0.4 <= roll_s / (roll_s + SETTINGS.train_s) <= 0.6
    for bound in (1, 4):
        steps = run(replace(SETTINGS, max_staleness=bound))
        assert max(step.staleness for step in steps) <= bound
        assert seconds(synchronous) / seconds(steps) >= 1.6


def test_bound_is_made_use_of() -> None:
    # A trainer that is much slower than the rollouts: they run ahead as far as they may.
    slow = replace(SETTINGS, iterations=8, episode_s=0.01, max_staleness=3)
    assert max(step.staleness for step in run(slow)) == 3


def test_synchronous_step_begins_when_the_last_has_ended() -> None:
    equal = replace(SETTINGS, iterations=4, sigma=0.0, max_staleness=0)
    for step in run(equal):
        assert step.roll_s == pytest.approx(equal.episode_s)
        assert (step.train_s, step.sync_s) == (pytest.approx(equal.train_s), pytest.approx(0))


def test_sleeps_are_log_normal_and_decided_by_the_seed() -> None:
    settings = SyntheticSettings(episode_s=2.0, sigma=1.0)
    sleeps = [settings.sleep_s(seed) for seed in range(4000)]
    assert statistics.mean(sleeps) == pytest.approx(2.0, rel=0.1)
    assert statistics.median(sleeps) == pytest.approx(2.0 * 2.718281828**-0.5, rel=0.1)
    assert settings.sleep_s(7) == settings.sleep_s(7)
    assert replace(settings, sigma=0.0).sleep_s(7) == 2.0


@pytest.mark.parametrize(("workers", "sessions"), [(1, 64), (2, 32), (3, 22)])
def test_sessions_are_as_many_as_a_step_has_episodes(workers: int, sessions: int) -> None:
    assert SyntheticSettings(workers=workers).sessions == sessions
