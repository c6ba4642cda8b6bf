"""Keeps the rollout workers busy: leases groups, sends them to workers and settles the results."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rl_bridge.buffer.concurrency import Concurrency
from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.buffer.stored import LeasesInUse, dump_groups, load_groups, token_leases
from rl_bridge.config import Config
from rl_bridge.config.self_play import Seating
from rl_bridge.data.sampling import TaskSampler
from rl_bridge.errors import NoReplicaError, ReplicaLostError, RolloutError
from rl_bridge.rollout.assignment import (
    TRAINING_SEEDS,
    Absence,
    Assignment,
    AssignmentResult,
    EpisodeSettings,
    NoTrajectory,
    Outcome,
    draw_environment,
    task_seed,
)
from rl_bridge.rollout.groups import (
    MIN_LOST_GROUPS,
    TOO_FEW,
    EnvironmentHealth,
    EpisodeCounts,
    Tally,
    final_outcomes,
    make_group_filter,
    playable_environments,
    summarize_outcomes,
)
from rl_bridge.services.handle import BalancedEndpoints
from rl_bridge.types import Ending, Group, PolicyVersion, Trajectory

if TYPE_CHECKING:
    from rl_bridge.generator.vllm_api import EngineTotals

logger = logging.getLogger(__name__)

LOSS_WINDOW_S = 0.5
"""Losses within this time are logged together."""
MAX_LOGGED_GROUPS = 8

PROGRESS_INTERVAL_S = 5.0
"""The longest time between two questions to the workers of how their assignments get on."""
ADJUST_INTERVAL_S = 5.0
"""The time between two questions to the engines of how busy they are."""


class LossReport:
    """Collects lost groups and logs them together shortly afterwards."""

    def __init__(self) -> None:
        self._groups_by_reason: dict[str, list[int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, group: int, reason: str) -> None:
        """Record that the work on a group was lost."""
        self._groups_by_reason.setdefault(reason, []).append(group)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOSS_WINDOW_S, self.log)

    def log(self) -> None:
        """Log the losses that are not logged yet, one line per reason."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        groups_by_reason, self._groups_by_reason = self._groups_by_reason, {}
        for reason, unsorted in groups_by_reason.items():
            groups = sorted(unsorted)
            shown = ", ".join(map(str, groups[:MAX_LOGGED_GROUPS])) + (
                ", …" if len(groups) > MAX_LOGGED_GROUPS else ""
            )
            logger.warning("work was lost, on %d group(s) (%s): %s", len(groups), shown, reason)


@dataclass(slots=True, frozen=True)
class PlayedGroup:
    """The outcomes of a group's episodes, as its worker returned them."""

    environment: str
    seed: int
    outcomes: dict[int, Outcome]
    result: AssignmentResult
    opponent: PolicyVersion | None


class Dispatcher:
    """The controller's side of the rollouts: while it is open, it has groups played as fast as admission allows.

    An error that retrying cannot help reaches the training loop through the buffer: `sample` raises it.

    Args:
        rollout: The service of `RolloutActor`, or any other with `play` and `cancel`.
        buffer: Where groups are leased from and added to.
        config: The run's.
        examples: The number of examples of a run on a dataset.
        collect: Plays groups until it is cancelled: `rl_bridge.loops.grpo.collect`.
        explain: Returns the traceback behind an environment's first failure, if this run started its servers.
        query_engines: Returns the engines' totals by replica, which the number of groups in flight follows with
            `rollout.concurrency` of "adaptive"; with None it never does.
    """

    def __init__(
        self,
        rollout: BalancedEndpoints,
        buffer: ReplayBuffer,
        config: Config,
        *,
        collect: "Callable[[Dispatcher], Coroutine[Any, Any, None]]",
        examples: int | None = None,
        explain: Callable[[str], Awaitable[str]] | None = None,
        query_engines: "Callable[[], Awaitable[Mapping[int, EngineTotals]]] | None" = None,
    ) -> None:
        rollouts, environments = config.rollout, config.environments
        self._weights = {name: env.weight for name, env in environments.items()} or {"": 1.0}
        groups, weights = buffer.admission.groups_per_batch, self._weights
        self.health = {
            name: EnvironmentHealth(
                window=max(MIN_LOST_GROUPS, round(groups * weight / sum(weights.values()))),
                max_lost_share=rollouts.max_lost_share,
            )
            for name, weight in weights.items()
        }
        """The health of each environment."""
        task_sources = {name: (env.tasks, env.sampling) for name, env in environments.items()}
        if config.data is not None:
            task_sources = {"": (examples, config.data.sampling)}
        self.samplers = {
            name: TaskSampler(tasks, sampling=sampling, seed=config.seed)
            for name, (tasks, sampling) in task_sources.items()
            if tasks is not None
        }
        """The samplers that draw a group's task, for environments whose tasks are numbered."""
        self._rollout = rollout
        self._buffer = buffer
        self._config = config
        self._filter = make_group_filter(config)
        prompts = rollouts.max_num_seqs * config.monarch.roles.policy.min_replicas
        # Admission bounds groups and sessions bound episodes. More groups than sessions would only wait at the workers.
        self._max_groups = max(1, sum(env.sessions for env in environments.values()) or prompts)
        adaptive = rollouts.concurrency == "adaptive" and query_engines is not None
        # An adaptive number begins with as many as fill the engines if environments take no time.
        full = -(-prompts // rollouts.group_size) if adaptive else self._max_groups
        self.concurrency = Concurrency(full, max_groups=self._max_groups)
        """How many groups may be in flight."""
        self.opponent: PolicyVersion | None = None
        """The version of the policy that plays frozen seats; None without any."""
        self._in_flight = 0
        self._place_freed = asyncio.Event()
        self._query_engines = query_engines if adaptive else None
        self._adjustment: asyncio.Task[None] | None = None
        self._deadlines: dict[int, asyncio.Timeout] = {}
        """By lease: when a worker's call counts as lost. It is put off as long as the assignment makes progress."""
        self._held_out_deadline: asyncio.Timeout | None = None
        self._progress_interval_s = min(PROGRESS_INTERVAL_S, config.call_timeout_s / 4)
        self._progress_watch: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._leases_by_task: dict[asyncio.Task[None], GroupLease] = {}
        self._cancellations: set[asyncio.Task[None]] = set()
        self._partial_groups: dict[int, tuple[str, dict[int, Outcome]]] = {}
        """For groups that wait for another worker or have it: their environment and outcomes of finished siblings."""
        self._held_out_leases = itertools.count(-1, -1)
        self._explain = explain
        self._collect = collect
        self._losses = LossReport()
        buffer.cancel = lambda leases: self._cancel_leases([lease.id for lease in leases])

    async def __aenter__(self) -> Self:
        """Start playing groups."""
        self._start_collecting()
        if self._query_engines is not None:
            self._adjustment = asyncio.create_task(self._follow_engines(self._query_engines))
            self._adjustment.add_done_callback(self._on_task_done)
        return self

    def _start_collecting(self) -> None:
        self._collector = asyncio.create_task(self._collect(self))
        self._collector.add_done_callback(self._on_task_done)

    async def _stop_collecting(self) -> None:
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_collecting()
        await self._cancel_groups()
        for task in (self._progress_watch, self._adjustment):
            if task is not None:
                task.cancel()
        self._progress_watch = self._adjustment = None
        self._losses.log()
        for cancellation in self._cancellations:
            cancellation.cancel()
        await asyncio.gather(*self._cancellations, return_exceptions=True)

    def record_served(self, version: PolicyVersion) -> None:
        """Record that every serving generator has these weights or newer ones, so that more groups may start."""
        self._buffer.record_served(version)

    @property
    def counts(self) -> EpisodeCounts:
        """How the training episodes ended, in all environments together."""
        return EpisodeCounts.sum(health.counts for health in self.health.values())

    def take_tallies(self) -> dict[str, Tally]:
        """Return each environment's tally of untrained groups and episodes since the last call."""
        tallies = {name: health.tally for name, health in self.health.items()}
        for health in self.health.values():
            health.tally = Tally()
        return tallies

    def suspend(self, environment: str, error: BaseException, *, permanently: bool = False) -> None:
        """Continue without an environment: for a while, or for good if its servers are gone for good.

        Raises:
            BaseException: `error`, if no other environment can be played.
        """
        now = asyncio.get_running_loop().time()
        if not (permanently or self.health[environment].is_playable(now)):
            return  # it is set aside already: the error is that of a group that was still in flight
        self.health[environment].suspend(error, now=now, permanently=permanently)
        if not (remaining := playable_environments(self.health, now=now)):
            raise error
        retry_note = "" if permanently else ", and tried again in a while"
        logger.warning(
            "the environment %s is set aside%s; the run goes on with %s: %s",
            environment,
            retry_note,
            ", ".join(remaining),
            error,
        )

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint as a JSON object, and its finished groups, whose tokens belong to it.

        Groups in flight are not part of it; they are played again.
        """
        ledger, groups = self._buffer.state()
        state = {
            "ledger": ledger,
            "groups": dump_groups(groups),
            "episodes": {name: health.counts.state() for name, health in self.health.items()},
            "tasks": {name: sampler.state() for name, sampler in self.samplers.items()},
        }
        return state, groups

    def leases_in_use(self) -> LeasesInUse:
        """Return the leases under which groups are being played or whose outcomes are kept."""
        ledger, partial = self._buffer.ledger, self._partial_groups.values()
        kept = Group(
            seed=0,
            trajectories=[
                outcome
                for _, outcomes in partial
                for outcome in outcomes.values()
                if isinstance(outcome, Trajectory)
            ],
        )
        in_progress = frozenset(lease.id for lease in ledger.leases)
        return LeasesInUse(
            leases=in_progress | token_leases([kept, *self._buffer.groups]), next_lease=ledger.next_lease
        )

    async def rewind(self, version: PolicyVersion, state: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint; groups in flight are recalled, and results that still arrive of them are stale.

        Every generator must hold the checkpoint's version again. A `state` of None means the beginning of the run; a
        damaged one raises RolloutError.
        """
        # First, so that no group starts meanwhile. It may have ended already, with the error that led to this rewind.
        await self._stop_collecting()
        await self._cancel_groups()
        self._partial_groups.clear()
        saved_counts: Mapping[str, Any] = {} if state is None else state["episodes"]
        for name, health in self.health.items():
            health.rewind(EpisodeCounts(**saved_counts.get(name, {})))
        saved_tasks: Mapping[str, Any] = {} if state is None else state["tasks"]
        unfinished = set() if state is None else {group for group, *_ in state["ledger"]["waiting"]}
        for name, sampler in self.samplers.items():
            sampler.restore(saved_tasks.get(name, {}))
            # The rest are stragglers that had been dropped but had not come back.
            for group in sampler.drawn_groups - unfinished:
                sampler.end(group, None)
        if state is None:
            self._buffer.restore(Ledger(max_losses=None).state(), [], served=version)
        else:
            self._buffer.restore(state["ledger"], load_groups(state.get("groups", ())), served=version)
        if self._collector is not None:
            self._start_collecting()

    async def play_held_out(
        self,
        seeds: Sequence[int],
        on_outcome: Callable[[int, Outcome], None],
        *,
        environment: str = "",
        temperature: float = 0.0,
        understood: bool = False,
        seatings: tuple[Seating, ...] = (),
    ) -> None:
        """Play one episode per seed, for evaluation.

        Args:
            seeds: The episodes' seeds.
            on_outcome: Called for each finished episode with the index of its seed and its outcome.
            environment: The environment's name.
            temperature: The sampling temperature; 0 plays greedily.
            understood: Whether the environment is known to accept the task's actions.
            seatings: In self-play, who plays at successive episodes' tables: each has one `TRAINED` seat, which is the
                episode. Without any, an episode is one seat, by `env.reset`.

        Raises:
            RolloutError: No episode made progress any more, the policy failed many times in a row, or the environment
                is gone for good.
        """
        slots, size = asyncio.Semaphore(self._max_groups), self._config.rollout.group_size
        if seatings:
            size = max(1, size // len(seatings)) * len(seatings)
        health = self.health[environment]
        counts = EpisodeCounts(understood=understood or health.counts.understood)
        finished = policy_failures = 0

        async def play(first: int) -> None:
            nonlocal finished, policy_failures
            chunk = tuple(seeds[first : first + size])
            async with slots:
                if health.is_gone():
                    raise RolloutError(f"the environment is gone: {health.error}") from health.error
                outcomes = await self._play_until_final(first, chunk, environment, temperature, seatings)
            counts.add_outcomes(outcomes)
            for index, outcome in enumerate(outcomes, first):
                on_outcome(index, outcome)
                finished += 1
                if not isinstance(outcome, NoTrajectory):
                    policy_failures = 0
                    continue
                counts.last_failure = outcome.reason
                policy_failures = policy_failures + 1 if outcome.ending is Ending.FAILED_POLICY else 0
                if policy_failures >= min(MIN_LOST_GROUPS, len(seeds)):
                    raise RolloutError(
                        f"the policy failed in {policy_failures} held-out episodes in a row: {outcome.reason} "
                        "(rollout.generate_timeout_s is how long an engine may go without a token)"
                    )

        try:
            async with (
                asyncio.timeout(self._config.stall_timeout_s) as deadline,
                asyncio.TaskGroup() as group,
            ):
                self._held_out_deadline = deadline
                for first in range(0, len(seeds), size):
                    group.create_task(play(first))
        except TimeoutError:
            raise RolloutError(
                f"expected {len(seeds)} episodes, got {finished}, and none has made progress for "
                f"{self._config.stall_timeout_s:g} s; see what the environment is waiting for, or raise "
                "rollout.timeout_s"
            ) from None
        except BaseExceptionGroup as error_group:
            raise error_group.exceptions[0] from error_group
        finally:
            self._held_out_deadline = None
        counts.require_understood(max(len(seeds), 1))

    async def _play_until_final(
        self,
        first: int,
        seeds: tuple[int, ...],
        environment: str,
        temperature: float,
        seatings: tuple[Seating, ...],
    ) -> list[Outcome]:
        """Send episodes, numbered from `first`, to workers until each has an outcome; the caller sets the deadline."""
        config = self._config
        episode = EpisodeSettings.of(config, environment, temperature=temperature)
        # Beyond the numbers of training groups, so that the seeds of no completion are those of another.
        sampling_key = (config.seed, TRAINING_SEEDS + first) if config.deterministic and temperature else None
        outcomes: dict[int, Outcome] = {}
        silences = 0
        while missing := [index for index in range(len(seeds)) if index not in outcomes]:
            assignment = Assignment(
                lease=next(self._held_out_leases),
                seeds=tuple(seeds[index] for index in missing),
                siblings=tuple(missing),
                settings=episode,
                environment=environment,
                sampling_key=sampling_key,
                seatings=seatings,
            )
            try:
                result = await self._call_worker(assignment)
            except asyncio.CancelledError:
                self._cancel_leases([assignment.lease])  # its worker would play on
                raise
            except (ReplicaLostError, NoReplicaError):
                continue
            except TimeoutError as error:
                silences += 1
                if silences == self._config.rollout.max_attempts:
                    lost = NoTrajectory(
                        absence=Absence.DROPPED, reason=str(error), ending=Ending.FAILED_ENVIRONMENT
                    )
                    outcomes |= dict.fromkeys(missing, lost)
                continue
            await self._log_first_failure(environment, result)
            outcomes |= final_outcomes(zip(missing, result.outcomes, strict=True))
        return [outcomes[index] for index in range(len(seeds))]

    async def next_group(self) -> GroupLease:
        """Wait for a free place among the groups in flight, then for a group that admission allows to start."""
        while self._in_flight >= self.concurrency.limit:
            self._place_freed.clear()
            await self._place_freed.wait()
        self._in_flight += 1
        try:
            return await self._buffer.lease()
        except BaseException:
            self._release_place()
            raise

    def _release_place(self) -> None:
        self._in_flight -= 1
        self._place_freed.set()

    async def _follow_engines(
        self, query_engines: "Callable[[], Awaitable[Mapping[int, EngineTotals]]]"
    ) -> None:
        """Let more groups be in flight while the engines could compute more, and fewer while prompts queue there."""
        while True:
            await asyncio.sleep(ADJUST_INTERVAL_S)
            self.concurrency.adjust(await query_engines(), in_flight=self._in_flight)
            self._place_freed.set()

    def begin(self, lease: GroupLease, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which plays a group, concurrently with the others; its place is free again when it is done."""
        task = asyncio.create_task(work)
        self._leases_by_task[task] = lease
        task.add_done_callback(self._on_task_done)

    async def play(self, lease: GroupLease) -> "PlayedGroup | None":
        """Have a worker play the unfinished rest of a group; None if the work was lost and the group awaits another."""
        config, rollouts = self._config, self._config.rollout
        partial = self._partial_groups.get(lease.group)
        environment, finished = partial or (self._draw_environment(lease.group), {})
        sampler = self.samplers.get(environment)
        # Which groups of the same weights are back by now depends on timing; that those of older weights are does not.
        known_below = lease.first if config.deterministic else lease.group
        task = lease.group if sampler is None else sampler.draw(lease.group, known=known_below)
        seed = task_seed(config.seed, task)
        unfinished = tuple(sibling for sibling in range(rollouts.group_size) if sibling not in finished)
        assignment = Assignment(
            lease=lease.id,
            seeds=(seed,) * len(unfinished),
            siblings=unfinished,
            settings=EpisodeSettings.of(config, environment, temperature=rollouts.temperature),
            environment=environment,
            group=lease.group,
            task=task,
            sampling_key=(config.seed, lease.group) if config.deterministic else None,
            seatings=() if (env := config.environments.get(environment)) is None else env.seatings,
        )
        opponent = self.opponent  # it may change while they are played
        try:
            result = await self._call_worker(assignment)
        except (ReplicaLostError, NoReplicaError, TimeoutError) as error:
            self._losses.add(lease.group, str(error))
            if not self._buffer.lose(lease, floor=lease.floor if finished else None):
                self._partial_groups.pop(lease.group, None)
                self._end_task(lease.group)
            if isinstance(error, TimeoutError):
                try:
                    self.health[environment].add_silent_group(config.call_timeout_s)
                except RolloutError as failure:
                    self.suspend(environment, failure)
            return None
        await self._log_first_failure(environment, result)
        outcomes = finished | dict(zip(unfinished, result.outcomes, strict=True))
        return PlayedGroup(environment, seed, outcomes, result, opponent)

    async def _call_worker(self, assignment: Assignment) -> AssignmentResult:
        """Have a worker play. Raises TimeoutError when it has reported no progress for `call_timeout_s`."""
        try:
            async with asyncio.timeout(self._silence_limit_s) as deadline:
                self._deadlines[assignment.lease] = deadline
                if self._progress_watch is None or self._progress_watch.done():
                    self._progress_watch = asyncio.create_task(self._watch_progress())
                    self._progress_watch.add_done_callback(self._on_task_done)
                result: AssignmentResult = await self._rollout.play.route(assignment)
                return result
        except TimeoutError as error:
            self._cancel_leases([assignment.lease])
            raise TimeoutError(
                f"no progress was reported for {self._config.call_timeout_s:g} s; their worker does not answer, or see "
                "what the episodes wait for; episodes with longer answers need a higher rollout.timeout_s"
            ) from error
        finally:
            del self._deadlines[assignment.lease]

    @property
    def _silence_limit_s(self) -> float:
        # Longer by what may pass until the next report: within the worker everything has the same deadline.
        return self._config.call_timeout_s + 2 * self._progress_interval_s

    async def _watch_progress(self) -> None:
        """Put off the deadlines of what makes progress, while workers play."""
        now = asyncio.get_running_loop().time
        while self._deadlines:
            await asyncio.sleep(self._progress_interval_s)
            asked_at = now()
            replies = await self._rollout.query_replicas("playing", timeout_s=self._progress_interval_s)
            silences = {lease: silent_s for reply in replies.values() for lease, silent_s in reply.items()}
            for lease, silent_s in silences.items():
                if (deadline := self._deadlines.get(lease)) is not None and not deadline.expired():
                    deadline.reschedule(asked_at - silent_s + self._silence_limit_s)
            if silences:
                progressed_at = asked_at - min(silences.values())
                self._buffer.record_progress(progressed_at)
                if (deadline := self._held_out_deadline) is not None and not deadline.expired():
                    deadline.reschedule(progressed_at + self._config.stall_timeout_s)

    async def settle(self, lease: GroupLease, played: "PlayedGroup") -> None:
        """Add a group to the buffer, drop it, or have another worker play what this one left unfinished.

        Raises:
            RolloutError: Too many groups are dropped, in this environment and all others: going on would not help.
        """
        outcomes, result, health = played.outcomes, played.result, self.health[played.environment]
        finished = final_outcomes(outcomes.items())
        self._partial_groups.pop(lease.group, None)
        if result.preempted and len(finished) < len(outcomes):
            if self._buffer.return_unfinished(lease, floor=lease.floor if finished else None):
                health.counts.count_attempts(result)
                if finished:
                    self._partial_groups[lease.group] = played.environment, finished
            else:
                self._end_task(lease.group)
            return
        trajectories = [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Trajectory)]
        group = Group(
            id=lease.group,
            seed=played.seed,
            environment=played.environment,
            opponent=played.opponent,
            trajectories=trajectories,
        )
        if len(trajectories) < self._config.rollout.min_group_size:
            refusal: str | None = f"{TOO_FEW}: {summarize_outcomes(outcomes.values())}"
        else:
            refusal = self._filter.refusal(group, first=lease.first)
        if refusal is None:
            current = await self._buffer.add(group, lease)
        else:
            current = self._buffer.drop(lease, refusal)
            health.tally.refused[refusal] += current
        signal = self._filter.signal(group) if current else None
        self._end_task(lease.group, {played.environment: signal})
        if current:
            health.counts.count_attempts(result)
        episodes = self._config.rollout.batch_size
        try:
            health.add_group(outcomes.values(), refusal, current=current, episodes=episodes)
        except RolloutError as error:
            self.suspend(played.environment, error)

    def _end_task(self, group: int, signals: Mapping[str, float | None] = MappingProxyType({})) -> None:
        # In all samplers: the group may have a task of an environment set aside since, and one of another environment.
        for name, sampler in self.samplers.items():
            sampler.end(group, signals.get(name))

    def _draw_environment(self, group: int) -> str:
        """Draw the environment of a group that starts now; while none is set aside it depends on the number alone."""
        names = playable_environments(self.health, now=asyncio.get_running_loop().time()) or list(self.health)
        weights = {name: self._weights[name] for name in names}
        return draw_environment(self._config.seed, group, weights)

    async def _log_first_failure(self, environment: str, result: AssignmentResult) -> None:
        health = self.health[environment]
        if result.last_failure is None or health.has_failed:
            return
        health.has_failed = True
        traceback = await self._explain(environment) if self._explain is not None else ""
        logger.warning(
            "an episode%s failed, not because of the policy; further failures are counted (failed, retried): %s%s",
            f" of {environment}" if environment else "",
            result.last_failure,
            f"\n{traceback}" if traceback else "",
        )

    def _cancel_leases(self, leases: Sequence[int]) -> None:
        cancellation = asyncio.ensure_future(self._send_cancellation(tuple(leases)))
        self._cancellations.add(cancellation)
        cancellation.add_done_callback(self._cancellations.discard)

    async def _send_cancellation(self, leases: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._rollout.cancel.fanout(leases)
        except Exception as error:  # a worker that cannot be reached is gone, or its group is dropped anyway
            logger.info("workers could not be told to stop: %s", error)

    async def _cancel_groups(self) -> None:
        """Cancel the groups in flight and tell the workers to stop playing them."""
        plays = dict(self._leases_by_task)
        for task in plays:
            task.cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        if plays:
            self._cancel_leases([lease.id for lease in plays.values()])

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Free the place of a task that is over; an error in it ends the rollouts."""
        if self._leases_by_task.pop(task, None) is not None:
            self._release_place()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._buffer.fail(error)
