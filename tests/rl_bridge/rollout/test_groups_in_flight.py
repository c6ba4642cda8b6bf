"""Groups in flight over a real worker, in simulated time: who has the sessions, and what counts as lost."""

import asyncio
from collections.abc import Callable
from typing import Any, Self, cast

import pytest

from benchmarks.asynchrony import InstantPolicy, SleepingTask
from benchmarks.simulated_time import simulated
from openenv_core import StepResult
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.environments.leases import Client, SessionDeadlines, SessionLeases
from rl_bridge.errors import RolloutError
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Trajectory, Turn

SIBLINGS = 4
TIMEOUT_S = 300.0


class Walk:
    """A session whose episodes take a number of steps of 100 s each; `steps` says how many the n-th episode takes."""

    def __init__(self, steps: Callable[[int], int], begun: list[int]) -> None:
        self._steps, self._begun = steps, begun

    async def connect(self) -> Self:
        return self

    async def reset(self, *, seed: int) -> StepResult[int]:
        self._left = self._steps(len(self._begun))
        self._begun.append(seed)
        return StepResult(observation=seed)

    async def step(self, action: int) -> StepResult[int]:
        await asyncio.sleep(100.0)
        self._left -= 1
        return StepResult(observation=0, reward=0.0, done=self._left == 0)

    async def close(self) -> None:
        pass


class HangingTask(SleepingTask):
    """Waits for ever for what was to be loaded, in its first episode."""

    hangs = True

    async def begin(self, *arguments: Any) -> Any:
        if self.hangs:
            self.hangs = False
            await asyncio.Event().wait()
        return await super().begin(*arguments)


class BusyPolicy(InstantPolicy):
    """Gives one answer after the other, each in less than the time that an answer may take."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def answer(self, *arguments: Any, **options: Any) -> tuple[Turn, str]:
        async with self._turn:
            await asyncio.sleep(0.9 * TIMEOUT_S)
            return await super().answer(*arguments, **options)


class Played:
    """A dispatcher, and a worker with a few sessions."""

    def __init__(
        self,
        steps: Callable[[int], int],
        *,
        sessions: int,
        groups: int,
        max_staleness: int = 0,
        task: SleepingTask | None = None,
        policy: InstantPolicy | None = None,
    ) -> None:
        self.begun: list[int] = []
        config = Config.model_validate(
            {
                "env": {"app": "a:b", "sessions": sessions, "message_timeout_s": 200.0},
                "rollout": {
                    "task": "a:b",
                    "batch_size": groups * SIBLINGS,
                    "group_size": SIBLINGS,
                    "timeout_s": TIMEOUT_S,
                },
                "deterministic": True,  # so that the policy, which answers with its seed, has one
            }
        )
        self.sessions = SessionLeases(
            lambda _: cast(Client, Walk(steps, self.begun)),
            sessions=sessions,
            deadlines=SessionDeadlines.of(config),
            urls=["walk"],
        )
        worker = RolloutWorker(
            self.sessions, task=task or SleepingTask(), policy=policy or InstantPolicy(), max_attempts=1
        )
        self.buffer = ReplayBuffer(
            Ledger(max_losses=2),
            Admission(groups_per_batch=groups, max_staleness=max_staleness, iterations=100),
            timeout_s=2 * TIMEOUT_S,
            straggler_timeout_s=1e9,
        )
        self.dispatcher = Dispatcher(LocalService(worker), self.buffer, config, collect=collect)


@simulated
async def test_sessions_of_ended_siblings_go_to_the_next_groups() -> None:
    played = Played(
        lambda number: 20 if number % SIBLINGS == 0 else 1,
        sessions=2 * SIBLINGS,
        groups=2,
        max_staleness=4,
    )
    async with played.dispatcher:
        await asyncio.sleep(250.0)
        # Of the first two groups one sibling each is left, of two more too, and the rest is for another.
        assert played.sessions.slots_taken == 2 * SIBLINGS
        assert len(set(played.begun)) >= 4
        await played.buffer.sample(0, 2)
    assert not played.buffer.ledger.lost


@simulated
async def test_episode_lives_as_long_as_it_makes_progress() -> None:
    """Also while it waits for others, in a training step and held out."""
    played = Played(lambda number: 15, sessions=2, groups=1)
    async with played.dispatcher as dispatcher:
        (group,) = await played.buffer.sample(0, 1)
        assert asyncio.get_running_loop().time() == 10 * TIMEOUT_S
        assert (len(group.trajectories), played.buffer.ledger.lost) == (SIBLINGS, 0)
        assert dispatcher.counts.dropped == 0
        outcomes: dict[int, Outcome] = {}
        await dispatcher.play_held_out(range(4), outcomes.__setitem__)
    assert all(isinstance(outcome, Trajectory) for outcome in outcomes.values())
    assert len(outcomes) == 4


@simulated
async def test_episode_lives_while_its_policy_answers_others() -> None:
    played = Played(lambda number: 1, sessions=4 * SIBLINGS, groups=4, policy=BusyPolicy())
    async with played.dispatcher as dispatcher:
        groups = await played.buffer.sample(0, 4)
    assert [len(group.trajectories) for group in groups] == [SIBLINGS] * 4
    assert (dispatcher.counts.played, played.buffer.ledger.lost) == (4 * SIBLINGS, 0)


@simulated
async def test_episode_that_is_silent_is_lost_and_its_group_played_again() -> None:
    task = HangingTask()
    played = Played(lambda number: 2 if number < SIBLINGS else 15, sessions=2 * SIBLINGS, groups=2, task=task)
    async with played.dispatcher:
        groups = await played.buffer.sample(0, 2)
    assert [group.id for group in groups] == [0, 1]
    assert [len(group.trajectories) for group in groups] == [SIBLINGS, SIBLINGS]
    assert played.buffer.ledger.lost == 1
    assert played.sessions.slots_taken == 0


@simulated
async def test_rollouts_in_which_nothing_gets_on_end_the_run() -> None:
    class Stuck(HangingTask):
        hangs = property(lambda self: True, lambda self, _: None)

    played = Played(lambda number: 1, sessions=SIBLINGS, groups=1, task=Stuck())
    async with played.dispatcher:
        with pytest.raises(RolloutError, match=r"none of the last 8 groups .* made no progress for 300 s"):
            await played.buffer.sample(0, 1)
        assert asyncio.get_running_loop().time() < 10 * TIMEOUT_S
        held_out: dict[int, Outcome] = {}
        with pytest.raises(RolloutError, match=r"has not taken a single step: 8 of 8 episodes failed"):
            await played.dispatcher.play_held_out(range(8), held_out.__setitem__)
    assert len(held_out) == 8
    assert played.sessions.slots_taken == 0
