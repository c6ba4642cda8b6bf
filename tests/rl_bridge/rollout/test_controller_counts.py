"""What passes through the controller for a trajectory: as many bytes, messages and objects whatever its tokens."""

import pickle
from typing import Any, Self, cast

import pytest

from benchmarks.asynchrony import InstantPolicy, SleepingTask
from benchmarks.controller import count_objects
from benchmarks.simulated_time import simulated
from openenv_core import StepResult
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import StoredBatch, TokenStore, make_samples
from rl_bridge.config import Config
from rl_bridge.environments.leases import Client, SessionDeadlines, SessionLeases
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import Assignment, AssignmentResult, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.groups import stored_batch, trained_trajectories
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens
from rl_bridge.types import Completion, PolicyVersion, Turn

SIBLINGS, GROUPS, STEPS = 4, 8, 3
TRAJECTORIES = SIBLINGS * GROUPS * STEPS


class Once:
    """A session whose episodes take three steps."""

    async def connect(self) -> Self:
        return self

    async def reset(self, *, seed: int) -> StepResult[int]:
        self._left = 3
        return StepResult(observation=seed)

    async def step(self, action: int) -> StepResult[int]:
        self._left -= 1
        return StepResult(observation=0, reward=float(action % 2), done=not self._left)

    async def close(self) -> None:
        pass


class LongAnswers(InstantPolicy):
    def __init__(self, tokens: int) -> None:
        self.version: PolicyVersion = 0
        self._tokens = tokens

    async def answer(self, prompt: Any, *, temperature: float, seed: int | None = None) -> tuple[Turn, str]:
        one = range(self._tokens)
        completion = Completion(
            tokens=[token % 997 for token in one],
            logprobs=[-token / 997 for token in one],
            versions=[self.version] * self._tokens,
            stopped=True,
        )
        return Turn(prompt=prompt, completion=completion), str(seed or 0)


class Wire:
    """What the controller gets of workers, counted as it is read."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self.messages = self.bytes = self.objects = 0

    async def play(self, assignment: Assignment) -> AssignmentResult:
        content = pickle.dumps(await self._worker.play(assignment))
        result: AssignmentResult = pickle.loads(content)
        self.messages += 1
        self.bytes += len(content)
        self.objects += count_objects(result)
        return result

    async def cancel(self, leases: tuple[int, ...]) -> None:
        pass

    async def playing(self) -> dict[int, float]:
        return self._worker.playing()


class Counted:
    def __init__(self, tokens: int) -> None:
        self.store, self.puts = TokenStore(), 0
        self.sent: list[StoredBatch] = []
        policy = LongAnswers(tokens)
        config = Config.model_validate(
            {
                "env": {"app": "a:b", "sessions": 16},
                "rollout": {"task": "a:b", "batch_size": SIBLINGS * GROUPS, "group_size": SIBLINGS},
                "deterministic": True,
            }
        )
        sessions = SessionLeases(
            lambda _: cast(Client, Once()),
            sessions=16,
            deadlines=SessionDeadlines.of(config),
            urls=["once"],
        )
        worker = RolloutWorker(
            sessions, task=SleepingTask(), policy=policy, max_attempts=1, keep_tokens=self._keep
        )
        self.wire = Wire(worker)
        self.buffer = ReplayBuffer(
            Ledger(max_losses=2),
            Admission(groups_per_batch=GROUPS, max_staleness=0, iterations=STEPS),
            timeout_s=1e4,
        )
        self.dispatcher = Dispatcher(LocalService(self.wire), self.buffer, config, collect=collect)
        self.policy = policy

    async def _keep(self, tokens: dict[TokenKey, TrajectoryTokens]) -> None:
        self.puts += 1
        self.store.put(tokens)

    async def train(self, tokens: int) -> None:
        async with self.dispatcher as dispatcher:
            for version in range(STEPS):
                groups = await self.buffer.sample(version, GROUPS)
                trained = trained_trajectories(groups, normalize_std=True)
                self.sent.append(stored_batch(trained, in_use=dispatcher.leases_in_use()))
                rows = make_samples(self.sent[-1], self.store.take(self.sent[-1]))
                assert sum(int(row.loss_mask.sum()) for row in cast(Any, rows)) == 3 * tokens * len(trained)
                self.policy.version = version + 1
                dispatcher.record_served(version + 1)
            outcomes: dict[int, Outcome] = {}
            puts = self.puts
            await dispatcher.play_held_out(range(SIBLINGS), outcomes.__setitem__)
            assert self.puts == puts  # tokens that nobody trains on stay where they are


@pytest.mark.parametrize("tokens", [1, 3000])
@simulated
async def test_a_trajectory_costs_the_controller_the_same_whatever_its_tokens(tokens: int) -> None:
    counted = Counted(tokens)
    await counted.train(tokens)
    wire = counted.wire
    assert counted.puts == GROUPS * STEPS  # one message to the trainer for a group
    assert wire.messages == GROUPS * STEPS + 1  # one to the controller, and the held-out episodes
    trajectories = TRAJECTORIES + SIBLINGS
    assert wire.bytes / trajectories < 400
    assert wire.objects / trajectories < 16
    assert len(counted.sent) == STEPS  # one to each rank of the trainer for a step
    assert sum(len(pickle.dumps(step)) for step in counted.sent) / TRAJECTORIES < 100
    assert sum(count_objects(step) for step in counted.sent) / TRAJECTORIES < 4
