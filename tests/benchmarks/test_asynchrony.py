"""The synthetic job of the asynchrony benchmark: what asynchrony gains in simulated time, and the bars."""

import asyncio
import statistics
from dataclasses import replace

import pytest

from benchmarks.asynchrony import BENCHMARK, ROLL, STALEST, SYNC, TRAIN, Plan, SyntheticWorker, run_job
from benchmarks.harness import Measurements
from benchmarks.simulated_time import simulate
from rl_bridge.services.handle import LocalService

PLAN = Plan(iterations=12, group_size=4, train_s=0.75)


class Trainer:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.trained: list[int] = []

    async def train_step(self, trajectories: int) -> None:
        self.trained.append(trajectories)
        await asyncio.sleep(self._plan.train_s)


def run(plan: Plan) -> list[dict[str, float]]:
    async def job() -> list[dict[str, float]]:
        trainer = Trainer(plan)
        worker = LocalService(SyntheticWorker(replace(plan, workers=1)))
        steps = await run_job(plan, worker, LocalService(trainer), clock=asyncio.get_running_loop().time)
        assert trainer.trained == [plan.groups_per_batch * plan.group_size] * plan.iterations
        return steps

    return simulate(job())


def seconds(steps: list[dict[str, float]]) -> float:
    return sum(step[phase] for step in steps for phase in (ROLL, TRAIN, SYNC))


def test_asynchrony_gains_what_the_bound_allows_and_stays_within_its_own() -> None:
    synchronous = run(replace(PLAN, max_staleness=0))
    assert {step[STALEST] for step in synchronous} == {0}
    roll_s = statistics.mean(step[ROLL] for step in synchronous)
    assert 0.4 <= roll_s / (roll_s + PLAN.train_s) <= 0.6
    for bound in (1, 4):
        steps = run(replace(PLAN, max_staleness=bound))
        assert max(step[STALEST] for step in steps) <= bound
        assert seconds(synchronous) / seconds(steps) >= 1.6


def test_bars_compare_with_the_synchronous_loop() -> None:
    measurements = Measurements()
    for name, rate, roll, stalest in (
        ("synchronous", 4.0, 0.9, 0),
        ("max_staleness 1", 7.0, 0.1, 1),
        ("max_staleness 4", 6.0, 0.0, 5),
    ):
        values = {"groups/s": rate, ROLL: roll, TRAIN: 1.0, SYNC: 0.1, STALEST: stalest}
        measurements.add_all(name, "", values)
    BENCHMARK.derive(measurements)
    bars = {(bar.label, bar.kind): bar for bar in BENCHMARK.bars(measurements)}
    assert bars["roll over a synchronous step", "at least"].value == pytest.approx(0.45)
    assert bars["max_staleness 1: groups/s over synchronous", "at least"].met
    assert not bars["max_staleness 4: groups/s over synchronous", "at least"].met
    assert not bars["max_staleness 4: staleness", "at most"].met
    rows = BENCHMARK.report(measurements, []).splitlines()
    assert [cell.strip() for cell in rows[-2].split("|")[1:4]] == ["max_staleness 1", "7.00", "1.75"]


def test_no_bar_without_measurements() -> None:
    measurements = Measurements()
    BENCHMARK.derive(measurements)
    assert (measurements.values, list(BENCHMARK.bars(measurements))) == ({}, [])
