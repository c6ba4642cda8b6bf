"""Keeps the rollout workers busy: leases groups, sends them out, settles what comes back."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.buffer.stored import dump_groups, load_groups
from rl_bridge.data.sampling import TaskSampler
from rl_bridge.errors import NoReplicaError, ReplicaLostError, RolloutError
from rl_bridge.rollout.assignment import (
    Assignment,
    AssignmentResult,
    EpisodeSettings,
    NoTrajectory,
    Outcome,
    draw_environment,
    draw_fork_turn,
    task_seed,
)
from rl_bridge.rollout.groups import (
    ACCEPT_ALL,
    FEWEST_LOST,
    TOO_FEW,
    EnvironmentHealth,
    EpisodeCounts,
    GroupFilter,
    PlayedEnvironment,
    Tally,
    final_outcomes,
    playable,
    summary,
)
from rl_bridge.types import Ending, Group, PolicyVersion, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class DispatchSettings:
    """How groups are played.

    Attributes:
        run_seed: The run's; with the number of a group, or of its task, it decides the seed that siblings begin from.
        group_size: Siblings of a group.
        min_group_size: Siblings that a group needs to be worth training, where others were dropped or cut.
        slots: Groups in flight at most.
        environments: Where they are played, by name.
        deterministic: Sample every completion with a seed of its own.
        timeout_s: How long a worker may take for an assignment, before it is taken for lost.
        max_lost_share: With more than this share of its latest episodes dropped for failures, an environment is set
            aside; where none is left the run ends.
        filter: Which finished groups are worth training.
        fork_turn: Between how many turns and how many siblings part; None where each begins with a reset.
    """

    run_seed: int
    group_size: int
    min_group_size: int
    slots: int
    environments: Mapping[str, PlayedEnvironment]
    deterministic: bool
    timeout_s: float
    max_lost_share: float = 0.5
    filter: GroupFilter = ACCEPT_ALL
    fork_turn: tuple[int, int] | None = None


logger = logging.getLogger(__name__)

LOSS_WINDOW_S = 0.5
"""Losses within so many seconds are one, as far as a reader is concerned."""
GROUPS_NAMED = 8


class LossReport:
    """Gathers the groups that were lost, and says so a moment later."""

    def __init__(self) -> None:
        self._lost: dict[str, list[int]] = {}
        self._soon: asyncio.TimerHandle | None = None

    def add(self, group: int, reason: str) -> None:
        """The work on a group was lost."""
        self._lost.setdefault(reason, []).append(group)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(LOSS_WINDOW_S, self.tell)

    def tell(self) -> None:
        """Say what is not said yet: a line a reason."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        lost, self._lost = self._lost, {}
        for reason, unsorted in lost.items():
            groups = sorted(unsorted)
            named = ", ".join(map(str, groups[:GROUPS_NAMED])) + (", …" if len(groups) > GROUPS_NAMED else "")
            logger.warning("work was lost, on %d group(s) (%s): %s", len(groups), named, reason)


@dataclass(slots=True, frozen=True)
class Played:
    """What became of a group at its worker."""

    environment: str
    seed: int
    outcomes: dict[int, Outcome]
    result: AssignmentResult


class Dispatcher:
    """The controller's side of the rollouts. While it is open, groups are played as fast as admission allows.

    What ends it, an error that trying again cannot help, reaches the loop through the buffer: `sample` raises it.

    Args:
        rollout: The service of `RolloutActor`, or of whatever else has `play` and `cut`.
        buffer: Where groups are leased from and added to.
        settings: How they are played.
        collect: Plays groups until it is cancelled: `rl_bridge.loops.grpo.collect`.
        explain: Asked for the traceback of an environment's first failure, where its servers are at hand.
    """

    def __init__(
        self,
        rollout: Any,
        buffer: ReplayBuffer,
        settings: DispatchSettings,
        *,
        collect: "Callable[[Dispatcher], Coroutine[Any, Any, None]]",
        explain: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        weights = {name: one.weight for name, one in settings.environments.items()}
        groups = buffer.admission.groups_per_batch
        self.health = {
            name: EnvironmentHealth(
                window=max(FEWEST_LOST, round(groups * weight / sum(weights.values()))),
                max_lost_share=settings.max_lost_share,
            )
            for name, weight in weights.items()
        }
        """How each environment fares."""
        self.samplers = {
            name: TaskSampler(one.tasks, sampling=one.sampling, seed=settings.run_seed)
            for name, one in settings.environments.items()
            if one.tasks is not None
        }
        """Which task of an environment a group has, where they are numbered."""
        self._rollout = rollout
        self._buffer = buffer
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.slots)
        self._leasing: asyncio.Task[None] | None = None
        self._plays: dict[asyncio.Task[None], GroupLease] = {}
        self._cuts: set[asyncio.Task[None]] = set()
        self._kept: dict[int, tuple[str, dict[int, Outcome]]] = {}
        """Of groups that wait for another worker: their environment, and outcomes of siblings that are finished."""
        self._held_out_leases = itertools.count(-1, -1)
        self._explain = explain
        self._collect = collect
        self._losses = LossReport()
        buffer.cut = self._cut

    async def __aenter__(self) -> Self:
        """Begin to play."""
        self._begin()
        return self

    def _begin(self) -> None:
        self._leasing = asyncio.create_task(self._collect(self))
        self._leasing.add_done_callback(self._ended)

    async def _end(self) -> None:
        if self._leasing is not None:
            self._leasing.cancel()
            await asyncio.gather(self._leasing, return_exceptions=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()
        await self._recall()
        self._losses.tell()
        for cut in self._cuts:
            cut.cancel()
        await asyncio.gather(*self._cuts, return_exceptions=True)

    def served(self, version: PolicyVersion) -> None:
        """Every serving generator holds these weights, or newer ones: more groups may start."""
        self._buffer.served(version)

    @property
    def counts(self) -> EpisodeCounts:
        """What became of the episodes that were played for training, in all environments."""
        return EpisodeCounts.sum(one.counts for one in self.health.values())

    def take_tallies(self) -> dict[str, Tally]:
        """By environment, what became since this was last asked of groups and episodes beside those trained."""
        taken = {name: one.tally for name, one in self.health.items()}
        for one in self.health.values():
            one.tally = Tally()
        return taken

    def set_aside(self, environment: str, error: BaseException, *, for_good: bool = False) -> None:
        """Play on without an environment: for a while, or for good, since its servers are.

        Raises:
            BaseException: The error, where no other environment can be played.
        """
        now = asyncio.get_running_loop().time()
        if not (for_good or self.health[environment].is_playable(now)):
            return  # a group that was under way
        self.health[environment].set_aside(error, now=now, for_good=for_good)
        if not (others := playable(self.health, now=now)):
            raise error
        until = "" if for_good else ", and tried again in a while"
        logger.warning(
            "the environment %s is set aside%s; the run goes on with %s: %s",
            environment,
            until,
            ", ".join(others),
            error,
        )

    def state(self) -> tuple[dict[str, Any], Callable[[], dict[str, bytes]]]:
        """What a checkpoint holds: a part for `json`, and attachments. Groups under way are played again.

        The attachments are of this moment too, and are written when they are called for, in any thread: with many
        tokens that takes long.
        """
        ledger, groups = self._buffer.state()
        episodes = {name: one.counts.state() for name, one in self.health.items()}
        tasks = {name: sampler.state() for name, sampler in self.samplers.items()}
        state = {"ledger": ledger, "episodes": episodes, "tasks": tasks}
        return state, lambda: {"groups": dump_groups(groups)}

    async def rewind(
        self, version: PolicyVersion, state: Mapping[str, Any] | None, attachments: Mapping[str, bytes]
    ) -> None:
        """Go back to a checkpoint; what is under way is recalled, and what still comes of it is late.

        Args:
            version: The checkpoint's, which every generator holds again.
            state: The checkpoint's; None for the beginning of the run.
            attachments: The checkpoint's.

        Raises:
            RolloutError: The checkpoint is damaged.
        """
        # First, so that nothing begins meanwhile. It may have ended already, with what made us go back.
        await self._end()
        await self._recall()
        self._kept.clear()
        counted: Mapping[str, Any] = {} if state is None else state["episodes"]
        for name, one in self.health.items():
            one.rewind(EpisodeCounts(**counted.get(name, {})))
        drawn: Mapping[str, Any] = {} if state is None else state["tasks"]
        for name, sampler in self.samplers.items():
            sampler.restore(drawn.get(name, {}))
        if state is None:
            self._buffer.restore(Ledger(max_losses=None).state(), [], served=version)
        else:
            self._buffer.restore(state["ledger"], load_groups(attachments["groups"]), served=version)
        if self._leasing is not None:
            self._begin()

    async def play_held_out(
        self,
        seeds: Sequence[int],
        episode: EpisodeSettings,
        done: Callable[[int, Outcome], None],
        *,
        environment: str = "",
        timeout_s: float,
        understood: bool = False,
    ) -> None:
        """Play one episode a seed, for evaluation.

        Args:
            seeds: The episodes'.
            episode: How they are played.
            done: Told of each that is over: its place among the seeds, and what became of it.
            environment: Where.
            timeout_s: That all of them may take.
            understood: Whether the environment is known to take the task's actions.

        Raises:
            RolloutError: The time ran out, the policy fails and fails, or the environment is gone for good.
        """
        free = asyncio.Semaphore(self._settings.slots)
        health = self.health[environment]
        counts = EpisodeCounts(understood=understood or health.counts.understood)
        ended = without_policy = 0

        async def play(first: int) -> None:
            nonlocal ended, without_policy
            part = tuple(seeds[first : first + self._settings.group_size])
            async with free:
                if health.is_gone():
                    raise RolloutError(f"the environment is gone: {health.error}") from health.error
                outcomes = await self._play_part(part, environment, episode)
            counts.ended(outcomes)
            for place, outcome in enumerate(outcomes, first):
                done(place, outcome)
                ended += 1
                if not isinstance(outcome, NoTrajectory):
                    without_policy = 0
                    continue
                counts.last_failure = outcome.reason
                without_policy = without_policy + 1 if outcome.ending is Ending.FAILED_POLICY else 0
                if without_policy >= min(FEWEST_LOST, len(seeds)):
                    raise RolloutError(
                        f"the policy failed in {without_policy} held-out episodes in a row: {outcome.reason} "
                        "(rollout.generate_timeout_s is how long an engine may go without a token)"
                    )

        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for first in range(0, len(seeds), self._settings.group_size):
                    group.create_task(play(first))
        except TimeoutError:
            raise RolloutError(
                f"expected {len(seeds)} episodes within {timeout_s:g} s, got {ended}; "
                "raise rollout.timeout_s, or look at what the environment waits for"
            ) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        counts.require_understood(max(len(seeds), 1))

    async def _play_part(
        self, seeds: tuple[int, ...], environment: str, episode: EpisodeSettings
    ) -> list[Outcome]:
        """Until every episode has an outcome, whoever plays it; the caller has the deadline."""
        outcomes: dict[int, Outcome] = {}
        while left := [place for place in range(len(seeds)) if place not in outcomes]:
            assignment = Assignment(
                lease=next(self._held_out_leases),
                seeds=tuple(seeds[place] for place in left),
                siblings=tuple(left),
                settings=episode,
                environment=environment,
            )
            with contextlib.suppress(ReplicaLostError, NoReplicaError):
                result: AssignmentResult = await self._rollout.play.route(assignment)
                await self._tell_first_failure(environment, result)
                outcomes |= final_outcomes(zip(left, result.outcomes, strict=True))
        return [outcomes[place] for place in range(len(seeds))]

    async def next_group(self) -> GroupLease:
        """Wait for a place among the groups in flight, and for one that admission allows to begin."""
        await self._slots.acquire()
        try:
            return await self._buffer.lease()
        except BaseException:
            self._slots.release()
            raise

    def begin(self, lease: GroupLease, work: Coroutine[Any, Any, None]) -> None:
        """Have a group played beside all others in flight; its place is free again when `work` is done."""
        play = asyncio.create_task(work)
        self._plays[play] = lease
        play.add_done_callback(self._ended)

    async def play(self, lease: GroupLease) -> "Played | None":
        """Have a worker play what is left of a group.

        Returns:
            What became of all siblings; None where the worker was lost: the group waits for another one.
        """
        settings = self._settings
        if lease.group in self._kept:
            environment, kept = self._kept.pop(lease.group)
        else:
            environment, kept = self._draw(lease.group), {}
        sampler = self.samplers.get(environment)
        # Which others are back by now is a matter of timing; whether those under older weights are is not.
        known = lease.first if settings.deterministic else lease.group
        task = lease.group if sampler is None else sampler.draw(lease.group, known=known)
        seed = task_seed(settings.run_seed, task)
        left = tuple(sibling for sibling in range(settings.group_size) if sibling not in kept)
        assignment = Assignment(
            lease=lease.id,
            seeds=(seed,) * len(left),
            siblings=left,
            settings=settings.environments[environment].episode,
            environment=environment,
            task=task,
            sampling_key=(settings.run_seed, lease.group) if settings.deterministic else None,
            fork_turn=settings.fork_turn
            and draw_fork_turn(settings.run_seed, lease.group, settings.fork_turn),
        )
        try:
            async with asyncio.timeout(settings.timeout_s):
                result: AssignmentResult = await self._rollout.play.route(assignment)
        except (ReplicaLostError, NoReplicaError, TimeoutError) as error:
            self._losses.add(lease.group, str(error) or "their worker does not answer")
            if not self._buffer.lose(lease, floor=lease.floor if kept else None):
                self._end_task(lease.group)
            elif kept:
                self._kept[lease.group] = environment, kept
            if isinstance(error, TimeoutError):
                self._cut([lease])
            return None
        await self._tell_first_failure(environment, result)
        return Played(environment, seed, kept | dict(zip(left, result.outcomes, strict=True)), result)

    async def settle(self, lease: GroupLease, played: "Played") -> None:
        """Add a group to the buffer, drop it, or let what a worker has not finished be played by another.

        Raises:
            RolloutError: Too many are dropped, in this environment and all others: playing on would not help.
        """
        outcomes, result, health = played.outcomes, played.result, self.health[played.environment]
        # Of siblings that share a beginning none is kept: another worker's begin elsewhere.
        kept = {} if self._settings.fork_turn else final_outcomes(outcomes.items())
        if result.preempted and len(kept) < len(outcomes):
            if self._buffer.give_back(lease, floor=lease.floor if kept else None):
                health.counts.attempted(result)
                if kept:
                    self._kept[lease.group] = played.environment, kept
            else:
                self._end_task(lease.group)
            return
        trajectories = [one for _, one in sorted(outcomes.items()) if isinstance(one, Trajectory)]
        group = Group(
            id=lease.group, seed=played.seed, environment=played.environment, trajectories=trajectories
        )
        if len(trajectories) < self._settings.min_group_size:
            refusal: str | None = f"{TOO_FEW}: {summary(outcomes.values())}"
        else:
            refusal = self._settings.filter.refusal(group, first=lease.first)
        if refusal is None:
            current = await self._buffer.add(group, lease)
        else:
            current = self._buffer.drop(lease, refusal)
            health.tally.refused[refusal] += current
        signal = self._settings.filter.signal(group) if current else None
        self._end_task(lease.group, {played.environment: signal})
        if current:
            health.counts.attempted(result)
        episodes = self._settings.group_size * self._buffer.admission.groups_per_batch
        try:
            health.ended(outcomes.values(), refusal, current=current, episodes=episodes)
        except RolloutError as error:
            self.set_aside(played.environment, error)

    def _end_task(self, group: int, signals: Mapping[str, float | None] = MappingProxyType({})) -> None:
        # In all: it may have been given a task of an environment that was set aside since, and then another.
        for name, sampler in self.samplers.items():
            sampler.end(group, signals.get(name))

    def _draw(self, group: int) -> str:
        """Where a group is played that begins now: by its number alone while no environment is set aside."""
        names = playable(self.health, now=asyncio.get_running_loop().time()) or list(self.health)
        weights = {name: self._settings.environments[name].weight for name in names}
        return draw_environment(self._settings.run_seed, group, weights)

    async def _tell_first_failure(self, environment: str, result: AssignmentResult) -> None:
        health = self.health[environment]
        if result.last_failure is None or health.has_failed:
            return
        health.has_failed = True
        traceback = await self._explain(environment) if self._explain is not None else ""
        logger.warning(
            "an episode%s failed, not by the policy's doing; others that do so are counted (failed, retried): %s%s",
            f" of {environment}" if environment else "",
            result.last_failure,
            f"\n{traceback}" if traceback else "",
        )

    def _cut(self, leases: Sequence[GroupLease]) -> None:
        cut = asyncio.ensure_future(self._tell_to_stop(tuple(lease.id for lease in leases)))
        self._cuts.add(cut)
        cut.add_done_callback(self._cuts.discard)

    async def _tell_to_stop(self, leases: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._rollout.cut.fanout(leases)
        except Exception as error:  # a worker that cannot be told is gone, or its group is dropped anyway
            logger.info("workers could not be told to stop: %s", error)

    async def _recall(self) -> None:
        """Wait for nothing that is under way, and tell the workers to stop."""
        plays = dict(self._plays)
        for play in plays:
            play.cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        if plays:
            self._cut(list(plays.values()))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """One of our tasks is over; an error in it is the end of all."""
        if self._plays.pop(task, None) is not None:
            self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._buffer.fail(error)
