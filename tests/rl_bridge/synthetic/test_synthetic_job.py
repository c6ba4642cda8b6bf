"""The synthetic job: what asynchrony gains in simulated time; in real processes all time is accounted for."""

import argparse
import asyncio
import json
import statistics
from dataclasses import replace

import pytest

from rl_bridge.cli.bench import COMMAND
from rl_bridge.services.handle import LocalService
from rl_bridge.synthetic.job import StepTimes, SyntheticSettings, SyntheticWorker, make_buffer, run_job
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


WINDOWS = 3
"""What a busy machine takes from a process belongs to nobody; in one of so many it takes next to nothing."""
UNACCOUNTED = 0.02


@pytest.mark.heavy
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_whole_job_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    for _ in range(WINDOWS):
        assert COMMAND.run(parser.parse_args(["throughput", "--synthetic", "--seconds", "4", "--json"])) == 0
        found = json.loads(capsys.readouterr().out)
        if found["unaccounted"] <= UNACCOUNTED:
            break
    assert (found["steps"], found["groups"]) == (4, 32)
    assert set(found["roles"]) == {"controller", "rollout", "trainer"}
    assert found["unaccounted"] <= UNACCOUNTED
    assert 0.3 < found["utilisation"]["trainer"] < 1.0
    waits = {row[1] for row in found["roles"]["rollout"]["seconds"]}
    assert {"assignments", "environment"} <= waits
