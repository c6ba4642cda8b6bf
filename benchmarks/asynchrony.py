"""The gain of asynchronous training: one job with max_staleness 0, 1 and 4, the same batch, sessions and workers.

Environments sleep for log-normal times (sigma 1) in two worker processes, a trainer computes in a third; admission,
ledger, buffer, dispatcher, workers and services are those of training. In alternating rounds; needs Monarch:
  python -m benchmarks.asynchrony              about six minutes
  python -m benchmarks.asynchrony --quick      does it run?
"""

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self, cast

from benchmarks.harness import (
    Bar,
    Benchmark,
    Measurements,
    at_least,
    at_most,
    in_rounds,
    main,
    ratio,
    setting,
)
from openenv_core import StepResult
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.environments.leases import Client, SessionLeases
from rl_bridge.errors import BridgeError, MissingDependencyError
from rl_bridge.loops.grpo import collect
from rl_bridge.metrics.spans import PROCESS_SPANS, SpanWindow, group_by_role, span
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.rollout.worker import RolloutWorker
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, PolicyVersion, Turn

BOUNDS: Final = {"synchronous": 0, "max_staleness 1": 1, "max_staleness 4": 4}
"""`max_staleness` of each job."""
SYNCHRONOUS: Final = "synchronous"
ROLES: Final = ("controller", "rollout", "trainer")
GROUPS, ROLL, TRAIN, SYNC, STALEST = "groups/s", "waits for roll s", "train s", "sync s", "most stale"
BUSY: Final = ("rollout busy %", "trainer busy %")
TABLES: Final = {"Loops": (GROUPS, "over synchronous", ROLL, TRAIN, SYNC, STALEST, *BUSY)}
TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured: sizes of a job, mean and sigma of its sleeps (log-normal), seconds of a training step."""

    rounds: int = setting(3, quick=1, option="jobs of each bound on staleness (3)")
    iterations: int = setting(30, quick=3)
    groups_per_batch: int = setting(8, quick=2)
    group_size: int = setting(8, quick=2)
    workers: int = 2
    episode_s: float = setting(0.15, quick=0.02)
    sigma: float = 1.0
    train_s: float = setting(0.9, quick=0.02)
    max_staleness: int = 0
    seed: int = 0

    @property
    def sessions(self) -> int:
        """The most episodes in flight per worker: over all workers a step's episodes, whatever the staleness."""
        return math.ceil(self.groups_per_batch * self.group_size / self.workers)

    def sleep_s(self, seed: int) -> float:
        """Return how long an episode's environment sleeps: log-normal with mean `episode_s`."""
        return self.episode_s * math.exp(random.Random(seed).gauss(0.0, self.sigma) - self.sigma**2 / 2)


class _SleepingClient:
    """A session with an environment whose only step sleeps for a time determined by the action."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    async def connect(self) -> Self:
        return self

    async def reset(self, *, seed: int) -> StepResult[int]:
        return StepResult(observation=seed)

    async def step(self, action: int) -> StepResult[int]:
        await asyncio.sleep(self._plan.sleep_s(action))
        return StepResult(observation=action, reward=float(action % 2), done=True)

    async def close(self) -> None: ...


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
        return [1]

    async def answer(
        self,
        prompt: Sequence[int],
        *,
        temperature: float,
        seed: int | None = None,
        max_new_tokens: int | None = None,
    ) -> tuple[Turn, str]:
        """Return the seed as text."""
        completion = Completion(tokens=[2], logprobs=[0.0], versions=[self.version], stopped=True)
        return Turn(prompt=prompt, completion=completion), str(seed)


class SyntheticWorker(RolloutWorker):
    """A rollout worker with sleeping environments."""

    def __init__(self, plan: Plan) -> None:
        self._instant = InstantPolicy()
        sessions = SessionLeases(
            lambda _: cast(Client, _SleepingClient(plan)), sessions=plan.sessions, urls=["sleep"]
        )
        super().__init__(sessions, task=SleepingTask(), policy=self._instant, max_attempts=1)

    def update_weights(self, version: PolicyVersion) -> None:
        """Answer under this version of the weights from now on."""
        self._instant.version = version


async def run_job(
    plan: Plan, rollout: Any, trainer: Any, *, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, float]]:
    """Run the loop of a job with these services; returns each step's seconds (ROLL, TRAIN, SYNC) and STALEST."""
    size = plan.groups_per_batch * plan.group_size
    groups_of = {"batch_size": size, "group_size": plan.group_size, "min_group_size": plan.group_size}
    turns = {"num_turns": 1, "timeout_s": TIMEOUT_S, "task": "none"}
    env = {"url": "http://sleep", "sessions": plan.sessions * plan.workers}
    config = Config.model_validate({"env": env, "rollout": turns | groups_of, "seed": plan.seed})
    # So that each answer has a seed, which determines its environment's sleep, whatever the staleness.
    config = config.model_copy(update={"deterministic": True})
    admission = Admission(
        groups_per_batch=plan.groups_per_batch, max_staleness=plan.max_staleness, iterations=plan.iterations
    )
    buffer = ReplayBuffer(Ledger(max_losses=None), admission, timeout_s=TIMEOUT_S)
    steps: list[dict[str, float]] = []
    await rollout.update_weights.fanout(0)
    async with Dispatcher(rollout, buffer, config, collect=collect) as dispatcher:
        for version in range(plan.iterations):
            at = [clock()]
            with span("collect", waits_for="rollout"):
                groups = await buffer.sample(version, plan.groups_per_batch)
            at.append(clock())
            with span("train", waits_for="trainer"):
                await trainer.train_step.route(sum(len(group.trajectories) for group in groups))
            at.append(clock())
            with span("synchronise", waits_for="rollout"):
                await rollout.update_weights.fanout(version + 1)
            dispatcher.record_served(version + 1)
            at.append(clock())
            seconds = {name: at[i + 1] - at[i] for i, name in enumerate((ROLL, TRAIN, SYNC))}
            steps.append({**seconds, STALEST: max(version - group.version for group in groups)})
    return steps


if find_spec("monarch") is not None:  # the loop runs without, in simulated time
    from monarch.actor import concurrent_endpoint, endpoint

    from rl_bridge.generator.vllm_api import ONE_THREAD
    from rl_bridge.loops.observation import SpanCollector
    from rl_bridge.rollout.actor import RolloutActor
    from rl_bridge.services.actor import ServiceActor
    from rl_bridge.services.fleet import Fleet

    class _RolloutActor(RolloutActor):
        """Serves a `SyntheticWorker`."""

        REPLAYED = ("update_weights",)

        def __init__(self, plan: Plan) -> None:
            self._plan = plan
            self._sessions, self._client = {}, None

        @concurrent_endpoint  # type: ignore[untyped-decorator]
        async def setup(self) -> None:
            self._worker = SyntheticWorker(self._plan)  # on the event loop where it plays
            self._workers = {"": self._worker}
            PROCESS_SPANS.rest("assignments")

        @concurrent_endpoint  # type: ignore[untyped-decorator]
        async def update_weights(self, version: PolicyVersion) -> None:
            self._worker.update_weights(version)

    class _TrainerActor(ServiceActor):
        """Keeps one core busy for `train_s`, however many trajectories a step has."""

        def __init__(self, plan: Plan) -> None:
            self._plan = plan

        @endpoint  # type: ignore[untyped-decorator]
        async def setup(self) -> None:
            PROCESS_SPANS.rest("batches")

        @endpoint  # type: ignore[untyped-decorator]
        async def train_step(self, trajectories: int) -> None:
            with PROCESS_SPANS.call(), span("train"):
                end = time.perf_counter() + self._plan.train_s
                while time.perf_counter() < end:
                    sum(range(1000))


def measure(plan: Plan, measurements: Measurements) -> None:
    """Run a job with each bound, round after round; raises BridgeError if one fails, or Monarch is not installed."""
    if find_spec("monarch") is None:
        raise MissingDependencyError("torchmonarch")
    for number, name in in_rounds(plan.rounds, BOUNDS):
        # The jobs of a round share its sleeps; another round draws others.
        job = replace(plan, max_staleness=BOUNDS[name], seed=number + 1)
        asyncio.run(_run_in_processes(job, name, measurements))


async def _run_in_processes(plan: Plan, name: str, measurements: Measurements) -> None:
    with tempfile.TemporaryDirectory(prefix="ropewalk-asynchrony-") as logs:
        async with Fleet(Path(logs)) as fleet:
            workers = _RolloutActor.options(name="rollout", num_replicas=plan.workers, environment=ONE_THREAD)
            trainers = _TrainerActor.options(name="trainer", environment=ONE_THREAD)
            rollout, trainer = await workers.as_service(plan), await trainers.as_service(plan)
            collector, window = SpanCollector(fleet), SpanWindow()
            await collector.collect()
            window.advance(collector.totals_by_process)
            began = time.perf_counter()
            steps = await fleet.guard(run_job(plan, rollout, trainer))
            seconds = time.perf_counter() - began
            await collector.collect()
            roles = group_by_role(window.advance(collector.totals_by_process))
    # The first step counts too, although nothing was prefetched for it.
    for figure in (ROLL, TRAIN, SYNC):
        measurements.add(figure, name, "", statistics.mean(step[figure] for step in steps))
    measurements.add(STALEST, name, "", max(step[STALEST] for step in steps))
    measurements.add(GROUPS, name, "", len(steps) * plan.groups_per_batch / seconds)
    for role in ROLES:
        lost_s, rest_s, wall_s = roles[role].unaccounted_s, roles[role].rest_s, roles[role].wall_s
        measurements.add("unaccounted", name, role, lost_s / wall_s)
        measurements.add(f"{role} busy %", name, "", 100 * (1 - (rest_s + lost_s) / wall_s))


def derive(measurements: Measurements) -> None:
    """Add each job's gain."""
    for name in BOUNDS:
        rates = (measurements.median(GROUPS, loop) for loop in (name, SYNCHRONOUS))
        measurements.add("over synchronous", name, "", ratio(*rates))


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    roll, train, sync = (measurements.median(phase, SYNCHRONOUS) or 0.0 for phase in (ROLL, TRAIN, SYNC))
    share = ratio(roll, roll + train + sync)
    yield from at_least("roll over a synchronous step", share, 0.4)
    yield from at_most("roll over a synchronous step", share, 0.6)
    for name, staleness in BOUNDS.items():
        if name != SYNCHRONOUS:
            gain = measurements.median("over synchronous", name)
            yield from at_least(f"{name}: groups/s over synchronous", gain, 1.6)
        yield from at_most(f"{name}: staleness", measurements.most(STALEST, name), staleness)
        for role in ROLES:
            unaccounted = measurements.median("unaccounted", name, role)
            yield from at_most(f"{name}: unaccounted time of the {role}", unaccounted, 0.02)


ERRORS: Final = (BridgeError,)
BENCHMARK = Benchmark(
    about=__doc__, plan=Plan, sections=(measure,), tables=TABLES, bars=bars, derive=derive, errors=ERRORS
)

if __name__ == "__main__":
    main("asynchrony")
