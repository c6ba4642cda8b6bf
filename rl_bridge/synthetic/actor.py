"""Runs a synthetic job on Monarch services."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from monarch.actor import concurrent_endpoint, endpoint

from rl_bridge.generator.vllm_api import ONE_THREAD
from rl_bridge.loops.observation import SpanCollector
from rl_bridge.metrics.spans import PROCESS_SPANS, SpanWindow, group_by_role, span
from rl_bridge.metrics.throughput import Throughput
from rl_bridge.rollout.actor import RolloutActor
from rl_bridge.services.actor import ServiceActor
from rl_bridge.services.fleet import Fleet
from rl_bridge.synthetic.job import StepTimes, SyntheticSettings, SyntheticWorker, make_buffer, run_job
from rl_bridge.types import PolicyVersion


@dataclass(kw_only=True, slots=True, frozen=True)
class SyntheticRun:
    """The result of a synthetic job: the time of each step, and how the processes spent it."""

    steps: list[StepTimes]
    throughput: Throughput


async def run_synthetic(settings: SyntheticSettings) -> SyntheticRun:
    """Start the processes, run the job, end the processes."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-synthetic-") as logs:
        async with Fleet(Path(logs)) as fleet:
            rollout = await SyntheticRolloutActor.options(
                name="rollout", num_replicas=settings.workers, environment=ONE_THREAD
            ).as_service(settings)
            trainer = await SyntheticTrainerActor.options(name="trainer", environment=ONE_THREAD).as_service(
                settings
            )
            collector, window = SpanCollector(fleet), SpanWindow()
            await collector.collect()
            window.advance(collector.totals_by_process)
            start_time = time.perf_counter()
            steps = await fleet.guard(run_job(settings, rollout, trainer, make_buffer(settings)))
            seconds = time.perf_counter() - start_time
            await collector.collect()
            return SyntheticRun(
                steps=steps,
                throughput=Throughput(
                    seconds=seconds,
                    steps=len(steps),
                    groups=len(steps) * settings.groups_per_batch,
                    roles=group_by_role(window.advance(collector.totals_by_process)),
                ),
            )


MATRIX = 128
"""Rows of the trainer's square matrix, whose product takes well below a millisecond."""


class SyntheticRolloutActor(RolloutActor):
    """Serves a `SyntheticWorker`."""

    REPLAYED = ("update_weights",)

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self._sessions, self._client = {}, None

    @concurrent_endpoint
    async def setup(self) -> None:
        """Make the worker, on the event loop where it plays."""
        self._worker = SyntheticWorker(self._settings)
        self._workers = {"": self._worker}
        PROCESS_SPANS.rest("assignments")

    @concurrent_endpoint
    async def update_weights(self, version: PolicyVersion) -> None:
        """See `SyntheticWorker.update_weights`."""
        self._worker.update_weights(version)


class SyntheticTrainerActor(ServiceActor):
    """Keeps one core busy for the duration of a step."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings

    @endpoint
    async def setup(self) -> None:
        """Make the matrix."""
        self._matrix = np.eye(MATRIX, dtype=np.float32)
        PROCESS_SPANS.rest("batches")

    @endpoint
    async def train_step(self, trajectories: int) -> None:
        """Compute for `train_s` seconds, however many trajectories there are."""
        with PROCESS_SPANS.call(), span("train"):
            end = time.perf_counter() + self._settings.train_s
            while time.perf_counter() < end:
                self._matrix = self._matrix @ self._matrix
