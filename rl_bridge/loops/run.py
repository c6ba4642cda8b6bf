"""A training run in progress: the state and services that a loop works with."""

import asyncio
import json
import math
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rl_bridge.algorithms.functions import AdvantageFunction
from rl_bridge.buffer.ledger import Fate, Ledger
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.buffer.stored import StoredBatch, token_key
from rl_bridge.config import Config
from rl_bridge.environments.servers import EnvironmentServers
from rl_bridge.errors import BridgeError, ReplicaLostError, RoleError
from rl_bridge.loops.cross_table import POLICIES_FOLDER, Opponents
from rl_bridge.loops.evaluation import measure_held_out
from rl_bridge.loops.observation import RunObserver, server_row, service_rows
from rl_bridge.loops.weight_sync import WeightSync
from rl_bridge.metrics.sinks import MetricsLog, environment_prefix, format_iteration, rewind
from rl_bridge.metrics.spans import span
from rl_bridge.metrics.status import PROCESS_STARTED_AT, EventRow, LeaseRow, StatusSnapshot
from rl_bridge.metrics.throughput import ELAPSED, TRAINED_STATE
from rl_bridge.records import RolloutRecords
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.groups import (
    EpisodeCounts,
    Tally,
    TrainedTrajectory,
    max_trajectory_length,
    rollout_metrics,
    stored_batch,
)
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.single_turn import DatasetReport
from rl_bridge.rollout.task import Task, to_floats
from rl_bridge.services.handle import EndpointOwner, LocalService
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import Group, PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet

HISTORY_FILE = "groups.jsonl"
WEIGHT_FILES = (".safetensors", ".bin", ".pt")
"""Substrings in the names of weight files, in all usual checkpoint layouts."""


class GroupHistory:
    """A JSON line for each iteration: the groups it trained, and those dropped since the last iteration."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._path = folder / HISTORY_FILE
        self._pending_fates: list[Fate] = []
        ledger.on_fate = lambda fate: self._pending_fates.append(fate)

    def state(self) -> list[Any]:
        """Return the fates that are in no line yet, as JSON values, for a checkpoint in mid-iteration."""
        return [(fate.group, fate.version, fate.reason) for fate in self._pending_fates]

    def write(self, iteration: PolicyVersion) -> None:
        """Append the line of the iteration just trained."""
        fates, self._pending_fates = self._pending_fates, []
        row = {
            "iteration": iteration,
            "trained": [fate.group for fate in fates if fate.reason is None],
            "dropped": {str(fate.group): fate.reason for fate in fates if fate.reason is not None},
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, iteration: PolicyVersion, pending_fates: Iterable[Any] = ()) -> None:
        """Drop the lines after an iteration; `pending_fates` is the checkpoint's `state`."""
        rewind(self._path, iteration)
        self._pending_fates = [
            Fate(group=group, version=version, reason=reason) for group, version, reason in pending_fates
        ]


class Iteration:
    """Times the parts of one iteration of a loop; each is a span of the process too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, *, waits_for: str | None = None) -> Iterator[None]:
        """Time a block; `waits_for` names the role that the loop waits for, None if it works itself."""
        began = time.perf_counter()
        try:
            with span(name, waits_for):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Return seconds of wall time, as `time/<part>_s`."""
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}


def trainer_settings(config: Config, folder: Path, model_path: Path) -> TrainerSettings:
    """Return the settings of the trainer's ranks, and of the reference model's."""
    return TrainerSettings(
        config=config,
        model_path=str(model_path),
        folder=str(folder.absolute()),
        max_loss_tokens=max_trajectory_length(config),
    )


_TRAINER_GONE = "the trainer is gone"


@contextmanager
def convert_write_errors(folder: Path, label: str) -> Iterator[None]:
    """Turn an OSError of writing into a run's folder within the block into a BridgeError."""
    try:
        yield
    except OSError as error:
        raise BridgeError(
            f"cannot write {label} to {str(folder)!r}: {error.strerror or error}; see that there is room, "
            f"then go on from the newest checkpoint: ropewalk train --resume {folder}"
        ) from error


class PreemptedError(Exception):
    """The run was preempted; its trainer is between two iterations."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A training run in progress.

    Attributes:
        tasks: The `Task` of each environment, which reports on it; for a dataset a `DatasetReport` under "".
        policy: The service of `PolicyActor`; `trainer` is that of `TrainerActor`.
        opponents: Who plays against the policy in self-play; None in a run without seats.
        dataset: The `Dataset.identity` of the run's dataset; None for a run on an environment.
        version: Iterations trained so far.
        seconds_before: Training time, in seconds, up to the checkpoint that a resumed run started from.
        latest_metrics: The metrics of the last iteration.
        checkpoint_begun: The version of the last checkpoint that the trainer was asked for; 0 before the first, and if
            the trainer is lost.
        trainer_lost: Set when a process of the trainer has died, until the run goes back to a checkpoint.
    """

    config: Config
    folder: Path
    model_path: Path
    tasks: Mapping[str, Task] | Mapping[str, DatasetReport]
    chat: ChatPolicy
    policy: EndpointOwner
    trainer: EndpointOwner
    dataset: Mapping[str, Any] | None
    buffer: ReplayBuffer
    dispatcher: Dispatcher
    sync: WeightSync
    observer: RunObserver
    metrics: MetricsLog
    history: GroupHistory
    records: RolloutRecords
    console: Console
    advantage: AdvantageFunction
    opponents: Opponents | None = None
    version: PolicyVersion = 0
    seconds_before: float = 0.0
    replay_buffer: EndpointOwner = field(init=False)
    latest_metrics: Mapping[str, float] = field(default_factory=dict, init=False)
    preempted: bool = field(default=False, init=False)
    checkpoint_begun: PolicyVersion = field(default=0, init=False)
    trainer_lost: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _began: float = field(default_factory=time.perf_counter, init=False)
    _first_version: PolicyVersion = field(init=False)

    def __post_init__(self) -> None:
        self.replay_buffer = LocalService(self.buffer)
        self._first_version = self.version

    @property
    def groups_per_step(self) -> int:
        """Groups per iteration."""
        return self.config.rollout.groups_per_step

    @property
    def train_seconds(self) -> float:
        """Wall time of the training so far, without set-up."""
        return self.seconds_before + time.perf_counter() - self._began

    def iteration(self) -> Iteration:
        """Start to time an iteration."""
        return Iteration()

    @asynccontextmanager
    async def deadline(self, expected: str) -> AsyncIterator[None]:
        """Limit the block, which calls a role, to `trainer.timeout_s` seconds; RoleError beyond that."""
        seconds = self.config.trainer.timeout_s
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RoleError(
                f"expected {expected} within {seconds:g} s, it is not there; "
                f"raise trainer.timeout_s, or see what hangs in {self.folder / 'logs'}"
            ) from None

    async def give_gpus_to_trainer(self) -> None:
        """If colocated, put the generators to sleep: the trainer takes the GPUs with its next call."""
        if self.config.monarch.colocate:
            with span("turn", waits_for="policy"):
                await self.policy.sleep.tell()  # those that start later wait for their turn by themselves

    async def give_gpus_to_generators(self) -> None:
        """If colocated, have the trainer leave the GPUs; generators wake with their next weight update."""
        if self.config.monarch.colocate:
            with span("turn", waits_for="trainer"):
                await self.trainer.release_gpu.route()

    @asynccontextmanager
    async def lend_gpus_to_trainer(self) -> AsyncIterator[None]:
        """If colocated, put the generators to sleep within the block; afterwards they wake with the same weights."""
        await self.give_gpus_to_trainer()
        yield
        await self.give_gpus_to_generators()
        if self.config.monarch.colocate:
            await self.policy.update_weights.fanout(self.version)

    async def meet_opponents(self, version: PolicyVersion) -> None:
        """In self-play, make the cross-table of a version if it is due, and draw who plays against it."""
        if self.opponents is not None:
            with (
                self.sync.without_deadline()
            ):  # a cross-table has one of its own, as it may be thousands of games
                await self.opponents.begin_round(version)

    async def log(
        self,
        iteration: Iteration,
        groups: Sequence[Group],
        trained: Sequence[TrainedTrajectory],
        metrics: Mapping[str, float],
    ) -> None:
        """Write the metrics of the iteration just trained, with a probe of the policy if one is due."""
        iterations, interval = self.config.trainer.iterations, self.config.evaluation.interval
        with span("log"):
            tallies = self.dispatcher.take_tallies()
            all_metrics = {
                **self._rollout_metrics(groups, Tally.sum(tallies.values())),
                **{
                    f"{environment_prefix(name)}{metric}": value
                    for name in self.tasks
                    for metric, value in self._environment_metrics(name, groups, tallies[name]).items()
                },
                **metrics,
                **self._lost_work_metrics(),
                "rollout/concurrency": float(self.dispatcher.concurrency.limit),
                "rollout/stragglers_cut": self.buffer.take_stragglers_cut() / len(groups),
                **iteration.metrics(),
                **self.sync.latest_metrics,
            }
            if self.opponents is not None:
                all_metrics.update(self.opponents.pool.add_results(groups))
        if self.version == iterations or (interval and self.version % interval == 0):
            with span("probe", waits_for="policy"):
                all_metrics.update(await self.probe())
        if (curve := self.config.evaluation.curve_interval) and (
            self.version == iterations or self.version % curve == 0
        ):
            with span("held-out episodes", waits_for="rollout"):
                await self.sync.finish()  # they are of the newest weights
                all_metrics.update(await measure_held_out(self, self.version))
        if self.opponents is not None:
            if self.version == iterations:
                await self.sync.finish()  # which makes the last cross-table
            all_metrics.update(self.opponents.take_metrics())
        with span("ask for spans", waits_for="processes"):
            all_metrics.update(await self.observer.metrics())
        all_metrics[ELAPSED] = self.train_seconds
        recorded = self.records.choose(self.version, groups)
        with span("fetch rollouts", waits_for="trainer"):
            keys = [token_key(one) for group in recorded.values() for one in group.trajectories]
            async with self.deadline("the tokens of a few rollouts"):
                tokens = await self.trainer.get_tokens.route(keys) if keys else []
        with span("log"):
            self.latest_metrics = all_metrics
            with convert_write_errors(self.folder, f"the metrics of iteration {self.version}"):
                self.metrics.write(self.version, all_metrics)
                self.history.write(self.version)
                with span("keep rollouts"):
                    advantages = {item.index: item.advantage for item in trained}
                    self.records.write(self.version, recorded, tokens, advantages)
            done = self.version - self._first_version
            remaining = (time.perf_counter() - self._began) / done * (iterations - self.version)
            self.console.print(
                format_iteration(self.version, iterations, all_metrics, remaining_s=remaining),
                highlight=False,
                soft_wrap=True,
            )

    def _rollout_metrics(self, groups: Sequence[Group], tally: Tally) -> Mapping[str, float]:
        return rollout_metrics(
            groups,
            version=self.version - 1,
            tally=tally,
            max_staleness=self.config.rollout.max_staleness,
        )

    def _environment_metrics(self, name: str, groups: Sequence[Group], tally: Tally) -> dict[str, float]:
        """Return an environment's metrics of its trajectories; of several environments all metrics of the run."""
        own_groups = [group for group in groups if group.environment == name]
        trajectories = [trajectory for group in own_groups for trajectory in group.trajectories]
        metrics = to_floats(self.tasks[name].metrics(trajectories), "metrics") if own_groups else {}
        if (sampler := self.dispatcher.samplers.get(name)) is not None:
            metrics.update(sampler.metrics())
        if name:
            metrics.update(self._rollout_metrics(own_groups, tally))
            metrics.update(_episode_metrics(self.dispatcher.health[name].counts))
        return metrics

    def _lost_work_metrics(self) -> dict[str, float]:
        """Return the counts of lost episodes, groups and leases since the start of the run."""
        ledger = self.buffer.ledger
        return _episode_metrics(self.dispatcher.counts) | {
            "rollout/groups_dropped": float(ledger.dropped.total()),
            "rollout/leases_lost": float(ledger.lost),
            "rollout/results_late": float(ledger.late),
        }

    def batch_of(self, trained: Sequence[TrainedTrajectory]) -> StoredBatch:
        """Return what the trainer is sent of a step's trajectories, whose tokens it has."""
        return stored_batch(trained, in_use=self.dispatcher.leases_in_use())

    async def probe(self) -> dict[str, float]:
        """Return the tasks' probes of the greedy policy."""
        await self.sync.finish()  # a probe is of the newest weights
        return {
            f"{environment_prefix(name)}probe/{metric}": value
            for name, task in self.tasks.items()
            for metric, value in to_floats(await task.probe(self.chat), "probe").items()
        }

    async def export(self, name: str) -> None:
        """Write the policy to a folder of the run's, in the Hugging Face layout, with the model's other files."""
        policy = self.folder.absolute() / name
        with convert_write_errors(self.folder, "the trained policy"):
            policy.mkdir(parents=True, exist_ok=True)
            for file in self.model_path.iterdir():
                if file.is_file() and not any(suffix in file.name for suffix in WEIGHT_FILES):
                    shutil.copy2(file, policy)
        async with self.deadline("the export of the trained policy"), self.lend_gpus_to_trainer():
            await self.trainer.export.route(str(policy), self.version)

    async def checkpoint(self, *, now: bool = False) -> None:
        """Write a checkpoint if one is due: every `trainer.checkpoint_interval` iterations, and at the end.

        It is written in the background, unless it is the last one or the run is colocated. With `now` it is due at
        once, and waited for. With an interval of 0 none is ever written. The policy is exported first if that is due.
        """
        exports = (self.config.trainer.export_interval, self.config.self_play.pool_interval)
        if not now and any(interval and self.version % interval == 0 for interval in exports):
            await self.export(f"{POLICIES_FOLDER}/{self.version}")
        interval = self.config.trainer.checkpoint_interval
        is_last = self.version == self.config.trainer.iterations
        if not interval or not (now or is_last or self.version % interval == 0):
            return
        # One consistent snapshot: rollouts continue while it is written, and are not in it.
        state, groups = self.dispatcher.state()
        tokens = [token_key(one) for group in groups for one in group.trajectories]
        state = {
            **state,
            "fates": self.history.state(),
            "seconds": self.train_seconds,
            "dataset": self.dataset,
            "opponents": None if self.opponents is None else self.opponents.state(),
        }
        with span("checkpoint", waits_for="trainer"):
            # Colocated, wait: its tensors leave the GPU afterwards.
            wait = now or is_last or bool(self.config.monarch.colocate)
            self.checkpoint_begun = self.version
            async with self.deadline("a checkpoint"), self.lend_gpus_to_trainer():
                await self.trainer.save_checkpoint.route(self.version, state, tokens, wait)

    async def wait_for_checkpoint(self) -> None:
        """Wait until the trainer, if it still lives, has written the checkpoint in progress or failed to."""
        with suppress(BridgeError):  # the run ends with another error
            if not self.trainer_lost.is_set():
                async with self.deadline("a checkpoint"):
                    await self.trainer.wait_for_checkpoint.route()

    def preempt(self) -> None:
        """End the loop with `PreemptedError` after the current iteration."""
        self.preempted = True
        self.buffer.fail(PreemptedError("the run was preempted"))

    def mark_trainer_lost(self) -> None:
        """Fail the waiters for rollouts, which may depend on weights that were lost with the trainer."""
        self.trainer_lost.set()
        self.checkpoint_begun = 0  # nobody writes it any more
        self.buffer.fail(ReplicaLostError(_TRAINER_GONE))

    def require_trainer(self) -> None:
        """Raise ReplicaLostError if the trainer was lost since the run last went back, even if it was restarted."""
        if self.trainer_lost.is_set():
            raise ReplicaLostError(_TRAINER_GONE)

    def restore(self, version: PolicyVersion, *, seconds: float, fates: Sequence[Any]) -> None:
        """Set the run, and its files, back to a version and its training time.

        BridgeError if the files cannot be set back.
        """
        self.version = self._first_version = self.checkpoint_begun = version
        with convert_write_errors(self.folder, f"the metrics up to iteration {version}"):
            self.metrics.rewind(version)
            self.history.rewind(version, fates)
            self.records.rewind(version)
        self.seconds_before, self._began = seconds, time.perf_counter()
        if self.preempted:  # the error that led back may have hidden the preemption's
            self.preempt()


def _episode_metrics(counts: EpisodeCounts) -> dict[str, float]:
    return {
        "rollout/episodes_retried": float(counts.retried),
        "rollout/episodes_dropped": float(counts.dropped),
        "rollout/episodes_unscored": float(counts.unscored),
    }


def environment_role(name: str) -> str:
    """Return the name of an environment's servers among the processes of a run."""
    return f"environment-{name}" if name else "environment"


MAX_STATUS_EVENTS = 50


def snapshot(run: Run, fleet: "Fleet", servers: Mapping[str, EnvironmentServers]) -> StatusSnapshot:
    """Return a snapshot of the run's status, without waiting. Metrics that are not finite are left out."""
    ledger, now = run.buffer.ledger, time.monotonic()  # the clock that leases are dated by
    return StatusSnapshot(
        name=run.folder.name,
        folder=str(run.folder.absolute()),
        host=socket.gethostname(),
        pid=os.getpid(),
        began=PROCESS_STARTED_AT,
        taken=time.time(),
        iterations=run.config.trainer.iterations,
        version=run.version,
        served=run.buffer.admission.served,
        max_staleness=run.config.rollout.max_staleness,
        services=(
            *service_rows(fleet, run.observer.versions),
            *(server_row(server, environment_role(name)) for name, server in servers.items()),
        ),
        groups={
            "waiting": ledger.waiting,
            "leased": len(ledger.leases),
            "finished": len(ledger.finished),
            TRAINED_STATE: ledger.trained,
            "dropped": ledger.dropped.total(),
        },
        leases=tuple(
            LeaseRow(
                group=lease.group,
                worker=run.observer.workers.get(lease.id, "-"),
                attempt=lease.attempt,
                age_s=now - lease.since,
            )
            for lease in ledger.leases
        ),
        events=tuple(
            EventRow(
                at=event.at,
                service=event.service,
                replica=event.replica,
                what=f"{event.kind}: {event.detail}" if event.detail else event.kind,
            )
            for event in list(fleet.events)[-MAX_STATUS_EVENTS:]
        ),
        spans=run.observer.spans.totals_by_process,
        # JSON has no NaN or infinity; one of them would make the whole reply invalid.
        metrics={name: value for name, value in run.latest_metrics.items() if math.isfinite(value)},
    )
