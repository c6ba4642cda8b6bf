"""The loop of a synthetic job: admission, ledger, buffer and dispatcher as in training, and the time of each part."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.environments.leases import SessionLeases
from rl_bridge.environments.session import Client
from rl_bridge.loops.grpo import collect
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.assignment import Assignment, AssignmentResult, RolloutService
from rl_bridge.rollout.dispatcher import Dispatcher, DispatchSettings
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.synthetic.environment import InstantPolicy, SleepingClient, SleepingTask
from rl_bridge.synthetic.settings import SyntheticSettings
from rl_bridge.types import Group, PolicyVersion

TIMEOUT_S = 600.0
"""For whatever should take seconds."""


class SyntheticWorker:
    """A rollout worker on sleeping environments."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._policy = InstantPolicy()
        sessions = SessionLeases(
            lambda _: cast(Client, SleepingClient(settings)), sessions=settings.sessions, urls=["sleep"]
        )
        self._worker = RolloutWorker(sessions, task=SleepingTask(), policy=self._policy, max_attempts=1)

    async def play(self, assignment: Assignment) -> AssignmentResult:
        """See `RolloutWorker.play`."""
        return await self._worker.play(assignment)

    @property
    def playing(self) -> tuple[int, ...]:
        """See `RolloutWorker.playing`."""
        return self._worker.playing

    async def cut(self, leases: tuple[int, ...]) -> None:
        """See `RolloutWorker.cut`."""
        self._worker.cut(leases)

    async def update_weights(self, version: PolicyVersion) -> None:
        """What is answered from now on comes from these weights."""
        self._policy.version = version


class WeightsEndpoint(Protocol):
    """`rollout.update_weights`."""

    async def fanout(self, version: PolicyVersion) -> object:
        """Tell every worker."""


class SyntheticRollout(RolloutService, Protocol):
    """The service of synthetic workers."""

    @property
    def update_weights(self) -> WeightsEndpoint:
        """Tells them of new weights."""


class TrainEndpoint(Protocol):
    """`trainer.train_step`."""

    async def route(self, trajectories: int) -> None:
        """Compute for a step."""


class SyntheticTrainer(Protocol):
    """The service of the trainer."""

    @property
    def train_step(self) -> TrainEndpoint:
        """Trains."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTimes:
    """One training step of a synthetic job, in seconds.

    Attributes:
        roll_s: Until the step's groups were there, from the end of the step before.
        train_s: Until it was trained.
        sync_s: Until the workers had the new weights.
        staleness: Of its most stale group.
    """

    roll_s: float
    train_s: float
    sync_s: float
    staleness: int


def make_buffer(settings: SyntheticSettings) -> ReplayBuffer:
    """The replay buffer of a job, with its ledger."""
    admission = Admission(
        groups_per_batch=settings.groups_per_batch,
        max_staleness=settings.max_staleness,
        iterations=settings.iterations,
    )
    return ReplayBuffer(
        Ledger(max_losses=None), admission, timeout_s=TIMEOUT_S, straggler_timeout_s=TIMEOUT_S
    )


async def run_job(
    settings: SyntheticSettings,
    rollout: SyntheticRollout,
    trainer: SyntheticTrainer,
    buffer: ReplayBuffer,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepTimes]:
    """Run the loop to its end.

    Raises:
        rl_bridge.errors.BridgeError: A part failed.
    """
    steps: list[StepTimes] = []
    await rollout.update_weights.fanout(0)
    async with Dispatcher(rollout, buffer, _dispatch(settings), collect=collect) as dispatcher:
        for version in range(settings.iterations):
            began = clock()
            with span("collect", waits_for="rollout"):
                groups = await buffer.sample(version, settings.groups_per_batch)
            rolled = clock()
            with span("train", waits_for="trainer"):
                await trainer.train_step.route(sum(len(group.trajectories) for group in groups))
            trained = clock()
            with span("synchronise", waits_for="rollout"):
                await rollout.update_weights.fanout(version + 1)
            dispatcher.served(version + 1)
            steps.append(
                StepTimes(
                    roll_s=rolled - began,
                    train_s=trained - rolled,
                    sync_s=clock() - trained,
                    staleness=_staleness(groups, version),
                )
            )
    return steps


def _dispatch(settings: SyntheticSettings) -> DispatchSettings:
    return DispatchSettings(
        run_seed=settings.seed,
        group_size=settings.group_size,
        min_group_size=settings.group_size,
        slots=settings.slots,
        episode=EpisodeSettings(temperature=1.0, num_turns=1, illegal_reward=0.0),
        deterministic=True,  # the seeds of the answers decide how long the environments sleep
        timeout_s=TIMEOUT_S,
    )


def _staleness(groups: Sequence[Group], version: PolicyVersion) -> int:
    return max(version - group.version for group in groups)
