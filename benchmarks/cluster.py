"""A large run in simulated time: how busy its controller is, and its sessions.

The controller is that of training: the loop with its `Run`, dispatcher, buffer, ledger and balancer, and its logs.
Episodes, steps of the trainer and updates of weights are timers, as long as an 8B model takes on H100 GPUs for 3,000
tokens a sample. The CPU time of this process counts as the controller's, but for the steps of workers' coroutines; a
message is pickled as often as it is sent, a batch once for each rank. Monarch's own work is left out. Sessions in use
are compared with the episodes that admission lets play at that moment, as far as there are sessions for them:
  python -m benchmarks.cluster              about three minutes
  python -m benchmarks.cluster --quick      does it run?
"""

import asyncio
import gc
import io
import itertools
import math
import pickle
import random
import tempfile
import time
import types
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self, TypeVar, cast

from rich.console import Console

from benchmarks.asynchrony import InstantPolicy
from benchmarks.harness import Bar, Benchmark, Measurements, at_least, at_most, in_rounds, main, setting
from benchmarks.simulated_time import simulate
from rl_bridge.algorithms.functions import load_advantage
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import StoredBatch
from rl_bridge.config import Config
from rl_bridge.environments.leases import Client, SessionDeadlines, SessionLeases
from rl_bridge.generator.base import UpdateMetrics
from rl_bridge.loops.grpo import collect, train
from rl_bridge.loops.observation import RunObserver
from rl_bridge.loops.run import GroupHistory, Run
from rl_bridge.loops.weight_sync import WeightSync
from rl_bridge.metrics.sinks import JsonlSink, MetricsLog
from rl_bridge.records import RolloutRecords
from rl_bridge.rollout.assignment import Assignment, AssignmentResult, EpisodeSettings, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.worker import ActiveAssignment, EpisodePlayer
from rl_bridge.services.balancer import Balancer
from rl_bridge.services.handle import BalancedEndpoints, Fanout, LocalService, LocalTarget
from rl_bridge.types import Ending, PolicyVersion, Trajectory, TurnSummary

T = TypeVar("T")
EVEN, UNEVEN = "even", "1% stragglers, a host lost"
CONTROLLER, SESSIONS, STEP, CPU = "controller busy %", "sessions busy / admitted", "step s", "CPU ms/step"
TABLES: Final = {"Runs": (CONTROLLER, SESSIONS, STEP, CPU)}
WORKERS_PER_HOST: Final = 4
GENERATOR_SHARE: Final = 1 / 4
"""The share of the GPUs that generate; the others train. Both then take about as long for a sample."""
SESSIONS_PER_GENERATOR: Final = 256
GENERATED_TOKENS: Final = 1000
"""Of a sample's tokens, those that the policy writes; at 256 sequences a generator writes 30 a second of each."""
TOKENS_PER_S: Final = 30.0
SIGMA: Final = 0.3
"""Of the log-normal length of an episode."""
STRAGGLER_FACTOR: Final = 10.0
TRAIN_FLOPS: Final = 8 * 8e9
"""A token's, of 8 billion parameters, with the forward pass recomputed in the backward one."""
GPU_FLOPS: Final = 0.4 * 989e12
UPDATE_S: Final = 2.0
HOST_LOST_AFTER: Final = 2
"""The iteration after which a host is lost, if one is."""
HOST_RESTART_S: Final = 120.0
SAMPLE_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(1, quick=1, option="runs of each kind (1)")
    gpus: tuple[int, ...] = setting((32, 224), quick=(20,))
    iterations: int = setting(12, quick=8)
    tokens: int = 3000
    group_size: int = 8
    groups_per_gpu: int = 4
    max_staleness: int = 4


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The sizes of one run, and how long its parts take."""

    plan: Plan
    gpus: int
    uneven: bool
    seed: int

    @property
    def generators(self) -> int:
        """GPUs that generate; each has a rollout worker beside it."""
        return round(GENERATOR_SHARE * self.gpus)

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.gpus - self.generators

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.plan.groups_per_gpu * self.gpus

    @property
    def train_s(self) -> float:
        """Seconds of a step of the trainer."""
        tokens = self.groups * self.plan.group_size * self.plan.tokens
        return tokens * TRAIN_FLOPS / (self.ranks * GPU_FLOPS)

    @property
    def episode_s(self) -> float:
        """Mean seconds of an episode."""
        return GENERATED_TOKENS / TOKENS_PER_S

    def draw_episode_s(self, lease: int, sibling: int) -> float:
        """Return how long an episode takes."""
        source = random.Random(f"{self.seed}-{lease}-{sibling}")
        seconds = self.episode_s * math.exp(source.gauss(0.0, SIGMA) - SIGMA**2 / 2)
        return seconds * (STRAGGLER_FACTOR if self.uneven and source.random() < 0.01 else 1.0)

    def make_config(self) -> Config:
        """Return the run's configuration."""
        size = self.groups * self.plan.group_size
        rollout = {
            "task": "none",
            "batch_size": size,
            "group_size": self.plan.group_size,
            "max_staleness": self.plan.max_staleness,
            "num_workers": self.generators,
            "max_num_seqs": SESSIONS_PER_GENERATOR,
            "timeout_s": 2 * STRAGGLER_FACTOR * self.episode_s,
            "straggler_timeout_s": 4 * self.episode_s,
        }
        sessions = self.generators * SESSIONS_PER_GENERATOR
        return Config.model_validate(
            {
                "env": {"url": "http://simulated", "sessions": sessions},
                "rollout": rollout,
                "trainer": {"iterations": self.plan.iterations, "checkpoint_interval": 0},
                "evaluation": {"interval": 0},
                "records": {"groups": 0},
            }
        )


_left_out_s = 0.0
"""CPU time of what is not the controller's, so far."""


@types.coroutine
def leave_out(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run a coroutine, whose steps are not the controller's: their CPU time is left out."""
    global _left_out_s
    error: BaseException | None = None
    while True:
        began = time.process_time()
        try:
            step = work.send(None) if error is None else work.throw(error)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            _left_out_s += time.process_time() - began
        error = None
        try:
            yield step
        except BaseException as thrown:
            error = thrown


def controller_cpu_s() -> float:
    """Return the controller's CPU time so far."""
    return time.process_time() - _left_out_s


class _Session:
    """A session that is open at once."""

    async def connect(self) -> Self:
        return self

    async def close(self) -> None: ...


class Worker(EpisodePlayer):
    """A rollout worker whose episodes hold a session for as long as they would take."""

    def __init__(self, cluster: Cluster, config: Config, generators: "Generators") -> None:
        super().__init__(InstantPolicy(), max_attempts=1)
        self._cluster = cluster
        self._generators = generators
        self.sessions = SessionLeases(
            lambda _: cast(Client, _Session()),
            sessions=SESSIONS_PER_GENERATOR,
            urls=["simulated"],
            deadlines=SessionDeadlines.of(config),
        )
        self.unfinished = 0
        """Episodes that play or wait for a session."""

    async def play(self, assignment: Assignment) -> AssignmentResult:
        """See `Player.play`; the controller writes the assignment's message and reads the result's."""
        message = await leave_out(self._reply(pickle.dumps(assignment)))
        result: AssignmentResult = pickle.loads(message)
        return result

    async def _reply(self, message: bytes) -> bytes:
        return pickle.dumps(await super().play(pickle.loads(message)))

    async def attempt(
        self, indices: Sequence[int], active: ActiveAssignment, policy: ChatPolicy, start: EpisodeSettings
    ) -> list[Outcome]:
        """Hold a session for an episode's time; every second sibling is rewarded."""
        (index,) = indices
        return [await leave_out(self._attempt(index, active))]

    async def _attempt(self, index: int, active: ActiveAssignment) -> Outcome:
        assignment, sibling = active.assignment, active.assignment.siblings[index]
        self.unfinished += 1
        try:
            async with AsyncExitStack() as stack:
                with self.wait_for_turn(active):
                    await stack.enter_async_context(self.sessions.lease(order=assignment.group))
                version = self._generators.served
                await asyncio.sleep(self._cluster.draw_episode_s(assignment.lease, sibling))
        finally:
            self.unfinished -= 1
        self.record_progress(active)
        summary = TurnSummary(
            turns=1,
            tokens=GENERATED_TOKENS,
            version=version,
            stopped=True,
            lease=assignment.lease,
            sibling=sibling,
        )
        return Trajectory(
            seed=assignment.seeds[index],
            ending=Ending.COMPLETED,
            reward=float(sibling % 2),
            summary=summary,
        )


class Workers(BalancedEndpoints):
    """The service of rollout workers, of which a host can be lost."""

    def __init__(self, cluster: Cluster, config: Config, generators: "Generators") -> None:
        super().__init__(Balancer("rollout", wait_s=60.0), frozenset({"play", "cancel"}))
        self._new_worker = partial(Worker, cluster, config, generators)
        self._starts = itertools.count(1)
        self.by_replica: dict[int, Worker] = {}
        for replica in range(cluster.generators):
            self._start(replica)

    def _start(self, replica: int) -> None:
        self.by_replica[replica] = worker = self._new_worker()
        self._balancer.add(LocalTarget(worker, replica, next(self._starts)))

    async def lose_host(self) -> None:
        """Lose the workers of a host; they are started again after a while."""
        lost = [target for target in self._balancer.targets if target.replica < WORKERS_PER_HOST]
        for target in lost:
            del self.by_replica[target.replica]
            self._balancer.lose((target.replica, target.incarnation), "its host is gone")
        await asyncio.sleep(HOST_RESTART_S)
        for target in lost:
            self._start(target.replica)

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        calls = {
            target.replica: self._balancer.call(target, name, args, kwargs)
            for target in self._balancer.targets
        }
        return Fanout(dict(zip(calls, await asyncio.gather(*calls.values()), strict=True)), {})


@dataclass
class Generators:
    """Take new weights, one version after the other."""

    served: PolicyVersion = 0

    async def update_weights(self, version: PolicyVersion) -> UpdateMetrics:
        """Serve a version after a while."""
        await asyncio.sleep(UPDATE_S)
        self.served = version
        return UpdateMetrics(version=version)


@dataclass
class Trainer:
    """Trains for as long as a step would take."""

    cluster: Cluster
    sent_bytes: int = 0

    async def train_step(self, batch: StoredBatch, version: PolicyVersion) -> dict[str, float]:
        """Pickle a batch for each rank, and wait for as long as they would compute."""
        self.sent_bytes += sum(len(pickle.dumps(batch)) for _ in range(self.cluster.ranks))
        await asyncio.sleep(self.cluster.train_s)
        return {"loss/total": 0.0}

    async def push_weights(self, version: PolicyVersion) -> float:
        """Wait for as long as the weights would be written."""
        await asyncio.sleep(UPDATE_S)
        return UPDATE_S


class _Task:
    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {}

    async def probe(self, policy: ChatPolicy) -> dict[str, float]:
        return {}


@dataclass
class SessionUse:
    """How many sessions were in use, and how many admission allowed, at each look."""

    workers: Workers
    buffer: ReplayBuffer
    group_size: int
    busy: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)

    async def watch(self) -> None:
        """Look at regular intervals."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            workers = self.workers.by_replica.values()
            startable = max(0, self.buffer.admission.startable_groups(self.buffer.ledger.live))
            waiting = (startable + self.buffer.ledger.waiting) * self.group_size
            unfinished = sum(worker.unfinished for worker in workers)
            self.busy.append(sum(worker.sessions.slots_taken for worker in workers))
            self.admitted.append(min(len(workers) * SESSIONS_PER_GENERATOR, unfinished + waiting))


async def run(cluster: Cluster, folder: Path) -> dict[str, float]:
    """Train in simulated time; returns a value for each figure, without the first step, before which nothing plays."""
    config, generators, trainer = cluster.make_config(), Generators(), Trainer(cluster)
    workers = Workers(cluster, config, generators)
    buffer = ReplayBuffer(
        Ledger(max_losses=config.rollout.max_attempts),
        Admission(
            groups_per_batch=cluster.groups,
            max_staleness=config.rollout.max_staleness,
            iterations=config.trainer.iterations,
        ),
        timeout_s=config.stall_timeout_s,
        straggler_timeout_s=config.rollout.straggler_timeout_s,
    )
    use = SessionUse(workers, buffer, cluster.plan.group_size)
    dispatcher = Dispatcher(workers, buffer, config, collect=collect)
    clock = asyncio.get_running_loop().time
    marks = list[tuple[float, float, int]]()

    class Marking(Run):
        async def checkpoint(self, *, now: bool = False) -> None:
            await super().checkpoint(now=now)
            marks.append((clock(), controller_cpu_s(), len(use.busy)))
            if cluster.uneven and self.version == HOST_LOST_AFTER:
                background.append(asyncio.create_task(workers.lose_host()))

    with MetricsLog([JsonlSink(folder / "metrics.jsonl")]) as metrics:
        async with dispatcher:
            background = [asyncio.create_task(use.watch())]
            await train(
                Marking(
                    config=config,
                    folder=folder,
                    model_path=folder,
                    tasks={"": cast(Any, _Task())},
                    chat=cast(Any, None),
                    policy=LocalService(generators),
                    trainer=LocalService(trainer),
                    dataset=None,
                    buffer=buffer,
                    dispatcher=dispatcher,
                    sync=WeightSync(
                        on_error=buffer.fail, overlapped=True, timeout_s=config.trainer.timeout_s
                    ),
                    observer=RunObserver(cast(Any, SimpleNamespace(services={}))),
                    metrics=metrics,
                    history=GroupHistory(folder, buffer.ledger),
                    records=RolloutRecords(folder, str, config.records),
                    console=Console(file=io.StringIO()),
                    advantage=load_advantage(config.algorithm.advantage_function),
                )
            )
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    # From the end of the first step to the last but `max_staleness`, after which nothing more is admitted.
    (began, cpu_began, first), (ended, cpu_ended, last) = marks[0], marks[-2 - cluster.plan.max_staleness]
    steps = len(marks) - 2 - cluster.plan.max_staleness
    return {
        CONTROLLER: 100 * (cpu_ended - cpu_began) / (ended - began),
        SESSIONS: sum(use.busy[first:last]) / sum(use.admitted[first:last]),
        STEP: (ended - began) / steps,
        CPU: 1000 * (cpu_ended - cpu_began) / steps,
    }


def measure(plan: Plan, measurements: Measurements) -> None:
    """Run each cluster, with and without trouble."""
    for number, gpus in in_rounds(plan.rounds, plan.gpus):
        for load in (EVEN, UNEVEN):
            cluster = Cluster(plan=plan, gpus=gpus, uneven=load == UNEVEN, seed=number)
            gc.collect()
            gc.disable()  # else it would look at the workers' objects again and again
            try:
                with tempfile.TemporaryDirectory(prefix="ropewalk-cluster-") as folder:
                    figures = simulate(run(cluster, Path(folder)))
            finally:
                gc.enable()
            measurements.add_all(f"{gpus} GPUs", load, figures)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for subject, load in measurements.measured(CONTROLLER):
        yield from at_most(
            f"{subject}, {load}: {CONTROLLER}", measurements.median(CONTROLLER, subject, load), 10
        )
        yield from at_least(
            f"{subject}, {load}: {SESSIONS}", measurements.median(SESSIONS, subject, load), 0.9
        )


BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables=TABLES, bars=bars)

if __name__ == "__main__":
    main("cluster")
