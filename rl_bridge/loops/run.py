"""A training run in progress: everything a loop works with."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_bridge.buffer.bounded import ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.errors import RoleFailed
from rl_bridge.metrics import MetricsLog
from rl_bridge.metrics.console import ProgressBar, iteration_line
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.seeds import held_out_seeds
from rl_bridge.rollout.task import EvaluationResult, Task
from rl_bridge.rollout.workers import RolloutWorkers
from rl_bridge.types import Ending, PolicyVersion, Trajectory

ELAPSED = "time/elapsed_s"
"""Logged with each iteration: wall time of the training up to it, set-up apart, over every resumption."""

EVALUATION_CHUNK = 4096
"""Held-out episodes whose trajectories are kept at once."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A training run in progress.

    Attributes:
        config: What was asked for.
        folder: Where everything about the run is written.
        model_path: The checkpoint that the run began with.
        task: What ties the run to its environment.
        policy: The generator behind a chat template.
        workers: Play episodes.
        buffer: Groups between workers and trainer.
        trainer: Mesh of the `TrainerActor`.
        generator: Mesh of the `GeneratorActor`.
        reference: Mesh of the `ReferenceActor`; None where the KL coefficient is 0.
        metrics: Sinks.
        console: What a person watches.
        version: Iterations trained so far, equal to the version that the generator serves.
        seconds_before: Training time up to the checkpoint that a resumed run began with.
    """

    config: Config
    folder: Path
    model_path: Path
    task: Task
    policy: ChatPolicy
    workers: RolloutWorkers
    buffer: ReplayBuffer
    trainer: Any
    generator: Any
    reference: Any | None
    metrics: MetricsLog
    console: Console
    version: PolicyVersion = 0
    seconds_before: float = 0.0
    _began: float = field(default_factory=time.perf_counter, init=False)
    _first_version: PolicyVersion = field(init=False)

    def __post_init__(self) -> None:
        self._first_version = self.version

    async def play(self, seeds: Sequence[int]) -> list[Trajectory | None]:
        """Play one training episode a seed; None for those lost to failures."""
        return await self.workers.play(
            seeds, self._episode(self.config.rollout.temperature), timeout_s=self.config.rollout.timeout_s
        )

    @property
    def train_seconds(self) -> float:
        """Wall time of the training so far, set-up apart."""
        return self.seconds_before + time.perf_counter() - self._began

    @asynccontextmanager
    async def deadline(self, what: str) -> AsyncIterator[None]:
        """Give what a role is asked for within the block `trainer.timeout_s` seconds.

        Raises:
            RoleFailed: They were not enough.
        """
        seconds = self.config.trainer.timeout_s
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RoleFailed(
                f"expected {what} within {seconds:g} s, it is not there; "
                f"raise trainer.timeout_s, or see what hangs in {self.folder / 'logs'}"
            ) from None

    async def log(self, figures: Mapping[str, float]) -> None:
        """Write the figures of the iteration just trained, with a probe of the policy where one is due."""
        iterations, every = self.config.trainer.iterations, self.config.evaluation.interval
        complete = dict(figures)
        if self.version == iterations or (every and self.version % every == 0):
            complete.update(await self.probe())
        complete[ELAPSED] = self.train_seconds
        self.metrics.write(self.version, complete)
        trained = self.version - self._first_version
        remaining = (time.perf_counter() - self._began) / trained * (iterations - self.version)
        self.console.print(
            iteration_line(self.version, iterations, complete, remaining_s=remaining),
            highlight=False,
            soft_wrap=True,
        )

    async def probe(self) -> dict[str, float]:
        """Have the task look at the greedy policy."""
        return {f"probe/{name}": value for name, value in (await self.task.probe(self.policy)).items()}

    async def evaluate(self) -> EvaluationResult:
        """Play the held-out episodes greedily."""
        train_seconds = self.train_seconds
        total = self.config.evaluation.episodes
        unscored_before = self.workers.unscored
        rewards: list[float] = []
        endings: list[Ending] = []
        with ProgressBar("held-out episodes", max(total, 1), self.console) as bar:
            for first in range(0, total, EVALUATION_CHUNK):
                seeds = held_out_seeds(first, min(EVALUATION_CHUNK, total - first))
                played = await self.workers.play(
                    seeds,
                    self._episode(0.0),
                    timeout_s=self.config.rollout.timeout_s,
                    progress=lambda done, first=first: bar.update(first + done),  # type: ignore[misc]
                )
                rewards.extend(t.reward for t in played if t is not None)
                endings.extend(t.ending for t in played if t is not None)
        unscored = self.workers.unscored - unscored_before
        return EvaluationResult(
            rewards=rewards,
            endings=endings,
            dropped=total - len(rewards) - unscored,
            train_seconds=train_seconds,
            unscored=unscored,
        )

    def _episode(self, temperature: float) -> EpisodeSettings:
        return EpisodeSettings(
            temperature=temperature,
            num_turns=self.config.rollout.num_turns,
            illegal_reward=self.config.reward.illegal_answer,
            reset_options=self.config.env.reset,
        )
