"""The loop of a synthetic job: admission, ledger, buffer and dispatcher as in training, with each part timed."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from openenv_core import StepResult
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.environments.leases import Client, SessionLeases
from rl_bridge.loops.grpo import collect
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, PolicyVersion, Turn


@dataclass(kw_only=True, slots=True, frozen=True)
class SyntheticSettings:
    """The size of a synthetic job.

    Attributes:
        max_staleness: As `rollout.max_staleness`; 0 is synchronous.
        workers: Rollout workers, each a process.
        episode_s: How long an episode's environment sleeps on average.
        sigma: Standard deviation of the sleep's logarithm; 0 for equal episodes.
        train_s: How long the trainer computes for a step.
        seed: Determines every sleep.
    """

    max_staleness: int = 1
    iterations: int = 20
    groups_per_batch: int = 8
    group_size: int = 8
    workers: int = 2
    episode_s: float = 0.15
    sigma: float = 1.0
    train_s: float = 1.0
    seed: int = 0

    @property
    def sessions(self) -> int:
        """The most episodes in flight per worker: over all workers a step's episodes, whatever the staleness."""
        return math.ceil(self.groups_per_batch * self.group_size / self.workers)

    def sleep_s(self, seed: int) -> float:
        """Return how long an episode's environment sleeps: log-normal with mean `episode_s`."""
        log_deviation = random.Random(seed).gauss(0.0, self.sigma)
        return self.episode_s * math.exp(log_deviation - self.sigma**2 / 2)


PROMPT_TOKEN, ANSWER_TOKEN = 1, 2
"""The only tokens of the job."""


class SleepingClient:
    """A session with an environment whose only step sleeps."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings

    async def connect(self) -> Self:
        """Do nothing: there is no server."""
        return self

    async def reset(self, *, seed: int) -> StepResult[int]:
        """Begin an episode."""
        return StepResult(observation=seed)

    async def step(self, action: int) -> StepResult[int]:
        """Sleep for a time determined by the action."""
        await asyncio.sleep(self._settings.sleep_s(action))
        return StepResult(observation=action, reward=float(action % 2), done=True)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


class SleepingTask(Task):
    """Shows an empty message and parses every answer as a number."""

    def __init__(self) -> None:
        self.folder = Path()

    def messages(self, observation: Any) -> list[ChatMessage]:
        """Return one empty message."""
        return [ChatMessage(role="user", content="")]

    def parse(self, text: str) -> int:
        """Return the answer as a number."""
        return int(text)


class InstantPolicy(ChatPolicy):
    """Answers with its sampling seed at once, under the latest version of the weights."""

    def __init__(self) -> None:
        self.version: PolicyVersion = 0

    @contextmanager
    def pin_replica(self) -> Iterator["InstantPolicy"]:
        """Yield itself: there is no replica to stick to."""
        yield self

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        """Return one token."""
        return [PROMPT_TOKEN]

    async def answer(
        self, prompt: Sequence[int], *, temperature: float, seed: int | None = None
    ) -> tuple[Turn, str]:
        """Return the seed as text."""
        completion = Completion(tokens=[ANSWER_TOKEN], logprobs=[0.0], versions=[self.version], stopped=True)
        return Turn(prompt=prompt, completion=completion), str(seed)


TIMEOUT_S = 600.0
"""A limit for what should take seconds."""


class SyntheticWorker(RolloutWorker):
    """A rollout worker with sleeping environments."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._instant = InstantPolicy()
        sessions = SessionLeases(
            lambda _: cast(Client, SleepingClient(settings)), sessions=settings.sessions, urls=["sleep"]
        )
        super().__init__(sessions, task=SleepingTask(), policy=self._instant, max_attempts=1)

    def update_weights(self, version: PolicyVersion) -> None:
        """Answer under this version of the weights from now on."""
        self._instant.version = version


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTimes:
    """One training step of a synthetic job, in seconds.

    Attributes:
        roll_s: Time from the end of the previous step until the step's groups were collected.
        train_s: Time of the training step.
        sync_s: Time until the workers had the new weights.
        staleness: The staleness of its stalest group.
    """

    roll_s: float
    train_s: float
    sync_s: float
    staleness: int


def make_buffer(settings: SyntheticSettings) -> ReplayBuffer:
    """Return the replay buffer of a job, with its ledger."""
    admission = Admission(
        groups_per_batch=settings.groups_per_batch,
        max_staleness=settings.max_staleness,
        iterations=settings.iterations,
    )
    return ReplayBuffer(Ledger(max_losses=None), admission, timeout_s=TIMEOUT_S)


async def run_job(
    settings: SyntheticSettings,
    rollout: Any,
    trainer: Any,
    buffer: ReplayBuffer,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepTimes]:
    """Run the loop to its end.

    Args:
        settings: The job's settings.
        rollout: The service of `SyntheticWorker`s.
        trainer: The service of the synthetic trainer.
        buffer: The job's buffer, from `make_buffer`.
        clock: Returns the time in seconds.

    Returns:
        The times of each step.
    """
    steps: list[StepTimes] = []
    await rollout.update_weights.fanout(0)
    async with Dispatcher(rollout, buffer, _make_config(settings), collect=collect) as dispatcher:
        for version in range(settings.iterations):
            started_at = clock()
            with span("collect", waits_for="rollout"):
                groups = await buffer.sample(version, settings.groups_per_batch)
            rolled_at = clock()
            with span("train", waits_for="trainer"):
                await trainer.train_step.route(sum(len(group.trajectories) for group in groups))
            trained_at = clock()
            with span("synchronise", waits_for="rollout"):
                await rollout.update_weights.fanout(version + 1)
            dispatcher.record_served(version + 1)
            steps.append(
                StepTimes(
                    roll_s=rolled_at - started_at,
                    train_s=trained_at - rolled_at,
                    sync_s=clock() - trained_at,
                    staleness=max(version - group.version for group in groups),
                )
            )
    return steps


def _make_config(settings: SyntheticSettings) -> Config:
    """Return the configuration of a run of this size."""
    size = settings.groups_per_batch * settings.group_size
    config = Config.model_validate(
        {
            "env": {"url": "http://sleep", "sessions": settings.sessions * settings.workers},
            "rollout": {
                "task": "none",
                "batch_size": size,
                "group_size": settings.group_size,
                "min_group_size": settings.group_size,
                "num_turns": 1,
                "timeout_s": TIMEOUT_S,
            },
            "seed": settings.seed,
        }
    )
    # So that each answer has a seed, which determines its environment's sleep, whatever the staleness.
    return config.model_copy(update={"deterministic": True})
