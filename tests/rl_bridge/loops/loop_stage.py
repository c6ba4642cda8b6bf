"""A loop among roles that are no processes."""

import asyncio
import inspect
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from rich.console import Console

from rl_bridge.algorithms.functions import load_advantage
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.buffer.stored import StoredBatch, TokenStore
from rl_bridge.config import Config
from rl_bridge.errors import TrainerWentBackError
from rl_bridge.loops.grpo import collect
from rl_bridge.loops.observation import RunObserver
from rl_bridge.loops.recovery import train_with_recovery
from rl_bridge.loops.run import GroupHistory, Run
from rl_bridge.loops.weight_sync import WeightSync
from rl_bridge.metrics.sinks import JsonlSink, MetricsLog
from rl_bridge.records import RolloutRecords
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.services.handle import LocalService
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens, dump_tokens
from rl_bridge.trainer.settings import ResumeState
from rl_bridge.types import Completion, Ending, Trajectory, Turn
from tests.rl_bridge.planning.published_models import QWEN3_8B

LIMIT_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def hang() -> None:
    await asyncio.sleep(LIMIT_S)


def raising(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


GPU_CALLS = frozenset({"train_step", "push_weights", "save_checkpoint", "export", "release_gpu"})
"""Calls for which the trainer needs the GPU."""


class Roles:
    """Trainer and generators, in this process.

    `calls` is what they were asked for; `failing` is what one of them does instead.
    """

    def __init__(self, *, colocated: bool) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Callable[[], Any]] = {}
        self.trained = 0
        self.served = 0
        self.saved = ResumeState()
        self.tokens = TokenStore()
        self.exported: list[str] = []
        self.colocated = colocated
        self.awake = True
        """Whether the generators have the turn."""
        self.waited: list[bool] = []

    async def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.colocated and name in GPU_CALLS:
            assert not self.awake, f"{name} beside generators that are awake"
        if name in self.failing:
            await self.failing[name]()

    def _require(self, version: int) -> None:
        if version != self.trained:
            raise TrainerWentBackError(f"expected {self.trained}, got {version}")

    async def train_step(self, batch: StoredBatch, version: int) -> dict[str, float]:
        await self._note("train_step")
        self._require(version)
        assert self.tokens.take(batch)
        self.trained += 1
        return {"loss/total": 0.0}

    async def push_weights(self, version: int) -> float:
        await self._note("push_weights")
        assert version == self.trained
        return 0.25

    async def save_checkpoint(
        self, version: int, run_state: dict[str, Any], tokens: list[TokenKey], wait: bool
    ) -> None:
        attachments = {"tokens": dump_tokens(dict(zip(tokens, self.tokens.get(tokens), strict=True)))}
        await self._note("save_checkpoint")
        self.waited.append(wait)
        state = json.loads(json.dumps(run_state))
        self.saved = ResumeState(version=version, run_state=state, attachments=attachments)

    async def get_tokens(self, keys: list[TokenKey]) -> list[TrajectoryTokens]:
        return self.tokens.get(keys)

    async def wait_for_checkpoint(self) -> None:
        await self._note("wait_for_checkpoint")

    async def release_gpu(self) -> None:
        await self._note("release_gpu")

    async def get_resume_state(self) -> ResumeState:
        await self._note("get_resume_state")
        self.trained = self.saved.version
        if "tokens" in self.saved.attachments:
            self.tokens.load(self.saved.attachments["tokens"])
        return self.saved

    async def export(self, folder: str, version: int) -> None:
        self.exported.append(folder)
        await self._note("export")
        self._require(version)

    async def update_weights(self, version: int) -> SimpleNamespace:
        await self._note("update_weights")
        self.served, self.awake = version, True
        return SimpleNamespace(transport_s=0.5, pause_s=0.75, load_s=0.125)

    async def sleep(self) -> None:
        await self._note("sleep")
        self.awake = False


class Rollout:
    """Plays one turn an episode; the siblings' rewards alternate. Every episode of a lost group is dropped."""

    def __init__(self, roles: Roles, lost: Callable[[int], bool]) -> None:
        self._roles = roles
        self._lost = lost
        self.played = 0

    async def play(self, assignment: Assignment) -> AssignmentResult:
        self.played += 1
        if self._lost(self.played):
            reason = "the table is on fire"
            gone: Outcome = NoTrajectory(absence=Absence.DROPPED, reason=reason)
            outcomes = (gone,) * len(assignment.seeds)
            return AssignmentResult(lease=assignment.lease, outcomes=outcomes, last_failure=reason)
        episodes = zip(assignment.seeds, assignment.siblings, strict=True)
        lease = assignment.lease
        return AssignmentResult(lease=lease, outcomes=tuple(self._one(lease, *one) for one in episodes))

    def _one(self, lease: int, seed: int, sibling: int) -> Trajectory:
        answer = Completion(
            tokens=[sibling % 2], logprobs=[-0.5], versions=[self._roles.served], stopped=True
        )
        turn = Turn(prompt=[1, 2], completion=answer)
        one = Trajectory(seed=seed, turns=[turn], ending=Ending.COMPLETED, reward=float(sibling % 2))
        self._roles.tokens.put({(lease, sibling): TrajectoryTokens.of([turn])})
        return one.without_tokens(lease=lease, sibling=sibling)

    async def cancel(self, leases: tuple[int, ...]) -> None:
        pass


class Task:
    def metrics(self, trajectories: Any) -> dict[str, float]:
        return {"task/trajectories": float(len(trajectories))}

    async def probe(self, policy: Any) -> dict[str, float]:
        return {"score": 1.0}


class Stage:
    def __init__(
        self,
        folder: Path,
        *,
        lost: Callable[[int], bool] = lambda number: False,
        max_staleness: int = 0,
        sessions: int = 8,
        dataset: Mapping[str, Any] | None = None,
        colocate: bool = False,
        evaluation: Mapping[str, Any] = MappingProxyType({}),
        **trainer: Any,
    ) -> None:
        self.folder = folder
        self.model_path = folder / "model"
        self.model_path.mkdir(exist_ok=True)
        (self.model_path / "config.json").write_text(json.dumps(QWEN3_8B))
        self.dataset = dataset
        self.roles = Roles(colocated=colocate)
        self.lost = lost
        self.done: object = None
        """What the work has returned."""
        self.config = Config.model_validate(
            {
                "env": {"app": "a:b", "sessions": sessions},
                "rollout": {
                    "task": "c:D",
                    "batch_size": 8,
                    "group_size": 2,
                    "max_staleness": max_staleness,
                    "weight_update": "continue" if colocate else "drain",
                    "timeout_s": 60.0,
                },
                "monarch": {"heartbeat_interval": 0.05, "colocate": colocate},
                "evaluation": evaluation,
                "trainer": {"iterations": 2, "timeout_s": 20.0, "checkpoint_interval": 1, **trainer},
            }
        )

    def on(self, name: str, then: Callable[[], object], *, call: int | None = None) -> None:
        """Have a role do something when it is called: every time, or the n-th."""
        calls = 0

        async def called() -> None:
            nonlocal calls
            calls += 1
            if call in (None, calls) and inspect.isawaitable(done := then()):
                await done

        self.roles.failing[name] = called

    async def train(self, work: Callable[[Run], Awaitable[object]] = train_with_recovery) -> Run:
        """Train to the end, or do what `work` says."""
        config = self.config
        rollout = config.rollout
        buffer = ReplayBuffer(
            Ledger(max_losses=2),
            Admission(
                groups_per_batch=4, max_staleness=rollout.max_staleness, iterations=config.trainer.iterations
            ),
            timeout_s=rollout.timeout_s,
            straggler_timeout_s=rollout.straggler_timeout_s,
        )
        service: Any = LocalService(Rollout(self.roles, self.lost))
        with MetricsLog([JsonlSink(self.folder / "metrics.jsonl")]) as metrics:
            async with (
                asyncio.timeout(LIMIT_S),
                Dispatcher(service, buffer, config, collect=collect) as dispatcher,
            ):
                sync = WeightSync(
                    on_error=buffer.fail,
                    overlapped=rollout.max_staleness > 0 and not config.monarch.colocate,
                    timeout_s=config.trainer.timeout_s,
                )
                run = Run(
                    config=config,
                    folder=self.folder,
                    model_path=self.model_path,
                    tasks={"": Task()},  # type: ignore[arg-type]
                    chat=None,  # type: ignore[arg-type]
                    policy=LocalService(self.roles),
                    trainer=LocalService(self.roles),
                    dataset=self.dataset,
                    buffer=buffer,
                    dispatcher=dispatcher,
                    sync=sync,
                    observer=RunObserver(SimpleNamespace(services={})),  # type: ignore[arg-type]
                    metrics=metrics,
                    history=GroupHistory(self.folder, buffer.ledger),
                    records=RolloutRecords(self.folder, str, config.records),
                    console=Console(file=io.StringIO()),
                    advantage=load_advantage(config.algorithm.advantage_function),
                )
                self.run = run
                try:
                    self.done = await work(run)
                    return run
                finally:
                    await sync.cancel()

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]
