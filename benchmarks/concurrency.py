"""Episodes in flight that follow the engine (`rollout.concurrency: adaptive`), in simulated time.

An engine answers so many prompts at once, and computes more for each when the keys and values of more episodes than it
can keep come back to it. Environments take a second for a step, and from some moment on twenty times as long, or first
long and then short. Dispatcher and buffer are those of training. Turns per second at the end are compared with those of
the best fixed number of groups in flight:
  python -m benchmarks.concurrency              about a minute
  python -m benchmarks.concurrency --quick      does it run?
"""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.asynchrony import InstantPolicy
from benchmarks.harness import Bar, Benchmark, Measurements, at_least, in_rounds, main, ratio, setting
from benchmarks.simulated_time import simulate
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.generator.vllm_api import EngineTotals
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import EpisodeSettings, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.worker import ActiveAssignment, EpisodePlayer
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Ending, Trajectory, TurnSummary

ADAPTIVE, BEST = "adaptive", "best fixed"
RATE, SHARE, GROUPS = "turns/s", "over the best fixed", "groups in flight"
TABLES: Final = {"After the change": (RATE, SHARE, GROUPS)}
CHANGES: Final = {"1x to 20x": (1.0, 20.0), "20x to 1x": (20.0, 1.0)}
MAX_STALENESS: Final = 500
"""So high that admission bounds nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(1, quick=1, option="runs of each kind (1)")
    fixed: tuple[int, ...] = setting((4, 8, 16, 24, 32, 48, 64, 128), quick=(8, 64))
    """Groups in flight, in sessions enough for each."""
    phase_s: float = setting(2000.0, quick=800.0)
    """How long environments are quick, and then slow; the last quarter is measured."""
    prompts: int = 16
    """Prompts that the engine answers at once."""
    cached: int = 96
    """Episodes whose keys and values it can keep."""
    group_size: int = 4
    turns: int = 8
    answer_s: float = 1.0
    recompute_s: float = 0.5
    """What an answer takes longer if its prompt is computed again."""
    step_s: float = 1.0


class Engine:
    """Answers prompts, a fixed number at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._free = asyncio.Semaphore(plan.prompts)
        self.totals = EngineTotals()
        self.answered = 0

    async def answer(self, episodes: int) -> None:
        """Answer a prompt while so many episodes are in flight."""
        plan, totals = self._plan, self.totals
        totals.waiting += 1
        async with self._free:
            totals.waiting -= 1
            totals.running += 1
            await asyncio.sleep(plan.answer_s + plan.recompute_s * max(0.0, 1 - plan.cached / episodes))
            totals.running -= 1
        self.answered += 1


class Worker(EpisodePlayer):
    """Plays episodes of some turns, each an answer and a step."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        super().__init__(InstantPolicy(), max_attempts=1)
        self._plan = plan
        self._engine = engine
        self._random = random.Random(0)
        self._episodes = 0
        self.latency = 1.0
        """How many times as long a step takes."""

    async def attempt(
        self, indices: Sequence[int], active: ActiveAssignment, policy: ChatPolicy, start: EpisodeSettings
    ) -> list[Outcome]:
        """Play an episode."""
        (index,) = indices
        self._episodes += 1
        for _ in range(self._plan.turns):
            await self._engine.answer(self._episodes)
            await asyncio.sleep(self.latency * self._plan.step_s * self._random.uniform(0.5, 1.5))
            self.record_progress(active)
        self._episodes -= 1
        summary = TurnSummary(turns=self._plan.turns, tokens=1, version=0, stopped=True)
        reward = float(active.assignment.siblings[index] % 2)
        return [Trajectory(seed=0, ending=Ending.COMPLETED, reward=reward, summary=summary)]


async def play(plan: Plan, latencies: tuple[float, float], groups: int | None) -> dict[str, float]:
    """Play with a fixed number of groups in flight, or an adaptive one; returns what the last quarter had."""
    sessions = groups or plan.group_size * max(plan.fixed)
    rollout = {
        "task": "none",
        "batch_size": plan.group_size,
        "group_size": plan.group_size,
        "max_num_seqs": plan.prompts,
        "timeout_s": 1e4,
        "concurrency": "fixed" if groups else "adaptive",
    }
    config = Config.model_validate(
        {"env": {"url": "http://simulated", "sessions": sessions}, "rollout": rollout}
    )
    engine = Engine(plan)
    worker = Worker(plan, engine)
    buffer = ReplayBuffer(
        Ledger(max_losses=None),
        Admission(groups_per_batch=1, max_staleness=MAX_STALENESS, iterations=1_000_000),
        timeout_s=1e4,
    )

    async def query_engines() -> Mapping[int, EngineTotals]:
        return {0: engine.totals}

    async def train() -> None:
        version = 0
        while True:
            await buffer.sample(version, 1)
            version += 1
            dispatcher.record_served(version)

    service: Any = LocalService(worker)
    dispatcher = Dispatcher(service, buffer, config, collect=collect, query_engines=query_engines)
    async with dispatcher:
        training = asyncio.create_task(train())
        for latency in latencies:
            worker.latency = latency
            await asyncio.sleep(0.75 * plan.phase_s)
            before = engine.answered
            await asyncio.sleep(0.25 * plan.phase_s)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        rate = (engine.answered - before) / (0.25 * plan.phase_s)
        return {RATE: rate, GROUPS: float(dispatcher.concurrency.limit)}


def measure(plan: Plan, measurements: Measurements) -> None:
    """Play with every number of groups in flight, and with an adaptive one."""
    for _, change in in_rounds(plan.rounds, CHANGES):
        latencies = CHANGES[change]
        fixed = [simulate(play(plan, latencies, groups)) for groups in plan.fixed]
        best = max(fixed, key=lambda figures: figures[RATE])
        adaptive = simulate(play(plan, latencies, None))
        measurements.add_all(BEST, change, best)
        share = ratio(adaptive[RATE], best[RATE])
        measurements.add_all(ADAPTIVE, change, {**adaptive, SHARE: share})


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for change in CHANGES:
        share = measurements.median(SHARE, ADAPTIVE, change)
        yield from at_least(f"{change}: {RATE}, adaptive over the best fixed", share, 0.9)


BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables=TABLES, bars=bars)

if __name__ == "__main__":
    main("concurrency")
