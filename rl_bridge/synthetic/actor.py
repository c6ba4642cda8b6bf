"""The synthetic job's processes as Monarch actors."""

import time

import numpy as np
from monarch.actor import concurrent_endpoint, endpoint

from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.rollout.assignment import Assignment, AssignmentResult
from rl_bridge.services.actor import ServiceActor
from rl_bridge.synthetic.job import SyntheticWorker
from rl_bridge.synthetic.settings import SyntheticSettings
from rl_bridge.types import PolicyVersion

MATRIX = 128
"""Rows of what the trainer multiplies: a product takes well below a millisecond."""


class SyntheticRolloutActor(ServiceActor):
    """A thin shell around `SyntheticWorker`."""

    REPLAYED = ("update_weights",)

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings

    @concurrent_endpoint
    async def setup(self) -> None:
        """Make the worker, on the loop where it plays."""
        self._worker = SyntheticWorker(self._settings)
        PROCESS_SPANS.rest("assignments")

    @concurrent_endpoint
    async def play(self, assignment: Assignment) -> AssignmentResult:
        """See `RolloutWorker.play`."""
        with PROCESS_SPANS.call():
            return await self._worker.play(assignment)

    @concurrent_endpoint
    async def playing(self) -> tuple[int, ...]:
        """See `RolloutWorker.playing`."""
        return self._worker.playing

    @concurrent_endpoint
    async def cut(self, leases: tuple[int, ...]) -> None:
        """See `RolloutWorker.cut`."""
        await self._worker.cut(leases)

    @concurrent_endpoint
    async def update_weights(self, version: PolicyVersion) -> None:
        """See `SyntheticWorker.update_weights`."""
        await self._worker.update_weights(version)


class SyntheticTrainerActor(ServiceActor):
    """Keeps one core busy for as long as a step takes."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings

    @endpoint
    async def setup(self) -> None:
        """Make what is multiplied."""
        self._matrix = np.eye(MATRIX, dtype=np.float32)
        PROCESS_SPANS.rest("batches")

    @endpoint
    async def train_step(self, trajectories: int) -> None:
        """Compute for `train_s` seconds, however many trajectories there are."""
        with PROCESS_SPANS.call(), span("train"):
            end = time.perf_counter() + self._settings.train_s
            while time.perf_counter() < end:
                self._matrix = self._matrix @ self._matrix
