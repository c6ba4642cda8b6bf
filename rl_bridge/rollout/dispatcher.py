"""Keeps the rollout workers busy: leases groups, sends them to workers and settles the results."""

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
from rl_bridge.config import Config
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
    FEWEST_LOST,
    TOO_FEW,
    EnvironmentHealth,
    EpisodeCounts,
    Tally,
    final_outcomes,
    group_filter,
    playable,
    summary,
)
from rl_bridge.types import Ending, Group, PolicyVersion, Trajectory

logger = logging.getLogger(__name__)

LOSS_WINDOW_S = 0.5
"""Losses within this time are logged together."""
GROUPS_NAMED = 8


class LossReport:
    """Collects lost groups and logs them together shortly afterwards."""

    def __init__(self) -> None:
        self._lost: dict[str, list[int]] = {}
        self._soon: asyncio.TimerHandle | None = None

    def add(self, group: int, reason: str) -> None:
        """Record that the work on a group was lost."""
        self._lost.setdefault(reason, []).append(group)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(LOSS_WINDOW_S, self.tell)

    def tell(self) -> None:
        """Log the losses that are not logged yet, one line per reason."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        lost, self._lost = self._lost, {}
        for reason, unsorted in lost.items():
            groups = sorted(unsorted)
            named = ", ".join(map(str, groups[:GROUPS_NAMED])) + (", …" if len(groups) > GROUPS_NAMED else "")
            logger.warning("work was lost, on %d group(s) (%s): %s", len(groups), named, reason)


@dataclass(slots=True, frozen=True)
class PlayedGroup:
    """The outcomes of a group's episodes, as its worker returned them."""

    environment: str
    seed: int
    outcomes: dict[int, Outcome]
    result: AssignmentResult


class Dispatcher:
    """The controller's side of the rollouts: while it is open, it has groups played as fast as admission allows.

    An error that retrying cannot help reaches the training loop through the buffer: `sample` raises it.

    Args:
        rollout: The service of `RolloutActor`, or any other with `play` and `cut`.
        buffer: Where groups are leased from and added to.
        config: The run's.
        examples: The number of examples of a run on a dataset.
        collect: Plays groups until it is cancelled: `rl_bridge.loops.grpo.collect`.
        explain: Returns the traceback behind an environment's first failure, if this run started its servers.
    """

    def __init__(
        self,
        rollout: Any,
        buffer: ReplayBuffer,
        config: Config,
        *,
        collect: "Callable[[Dispatcher], Coroutine[Any, Any, None]]",
        examples: int | None = None,
        explain: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        rollouts, worlds = config.rollout, config.environments
        self._weights = {name: env.weight for name, env in worlds.items()} or {"": 1.0}
        groups, weights = buffer.admission.groups_per_batch, self._weights
        self.health = {
            name: EnvironmentHealth(
                window=max(FEWEST_LOST, round(groups * weight / sum(weights.values()))),
                max_lost_share=rollouts.max_lost_share,
            )
            for name, weight in weights.items()
        }
        """The health of each environment."""
        numbered = {name: (env.tasks, env.sampling) for name, env in worlds.items()}
        if config.data is not None:
            numbered = {"": (examples, config.data.sampling)}
        self.samplers = {
            name: TaskSampler(tasks, sampling=sampling, seed=config.seed)
            for name, (tasks, sampling) in numbered.items()
            if tasks is not None
        }
        """The samplers that draw a group's task, for environments whose tasks are numbered."""
        self._rollout = rollout
        self._buffer = buffer
        self._config = config
        self._filter = group_filter(config)
        in_flight = sum(env.sessions for env in worlds.values()) or (
            rollouts.max_num_seqs * config.monarch.roles.policy.replicas
        )
        self._places = max(1, in_flight // rollouts.sessions_a_group)
        self._slots = asyncio.Semaphore(self._places)
        self._leasing: asyncio.Task[None] | None = None
        self._plays: dict[asyncio.Task[None], GroupLease] = {}
        self._cuts: set[asyncio.Task[None]] = set()
        self._kept: dict[int, tuple[str, dict[int, Outcome]]] = {}
        """For groups that wait for another worker: their environment and the outcomes of finished siblings."""
        self._held_out_leases = itertools.count(-1, -1)
        self._explain = explain
        self._collect = collect
        self._losses = LossReport()
        buffer.cut = self._cut

    async def __aenter__(self) -> Self:
        """Start playing groups."""
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
        """Record that every serving generator has these weights or newer ones, so that more groups may start."""
        self._buffer.served(version)

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

    def set_aside(self, environment: str, error: BaseException, *, for_good: bool = False) -> None:
        """Continue without an environment: for a while, or for good if its servers are gone for good.

        Raises:
            BaseException: `error`, if no other environment can be played.
        """
        now = asyncio.get_running_loop().time()
        if not (for_good or self.health[environment].is_playable(now)):
            return  # it is set aside already: the error is that of a group that was still in flight
        self.health[environment].set_aside(error, now=now, for_good=for_good)
        if not (remaining := playable(self.health, now=now)):
            raise error
        until = "" if for_good else ", and tried again in a while"
        logger.warning(
            "the environment %s is set aside%s; the run goes on with %s: %s",
            environment,
            until,
            ", ".join(remaining),
            error,
        )

    def state(self) -> tuple[dict[str, Any], Callable[[], dict[str, bytes]]]:
        """Return the state for a checkpoint: a JSON part and a function that serializes the attachments.

        Groups in flight are not part of it; they are played again. The attachments hold the state as of this call; with
        many tokens serializing takes long, so it happens when the function is called, in any thread.
        """
        ledger, groups = self._buffer.state()
        episodes = {name: health.counts.state() for name, health in self.health.items()}
        tasks = {name: sampler.state() for name, sampler in self.samplers.items()}
        state = {"ledger": ledger, "episodes": episodes, "tasks": tasks}
        return state, lambda: {"groups": dump_groups(groups)}

    async def rewind(
        self, version: PolicyVersion, state: Mapping[str, Any] | None, attachments: Mapping[str, bytes]
    ) -> None:
        """Go back to a checkpoint; groups in flight are recalled, and results that still arrive of them are stale.

        Every generator must hold the checkpoint's version again. A `state` of None means the beginning of the run; a
        damaged one raises RolloutError.
        """
        # First, so that no group starts meanwhile. It may have ended already, with the error that led to this rewind.
        await self._end()
        await self._recall()
        self._kept.clear()
        counted: Mapping[str, Any] = {} if state is None else state["episodes"]
        for name, health in self.health.items():
            health.rewind(EpisodeCounts(**counted.get(name, {})))
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
        done: Callable[[int, Outcome], None],
        *,
        environment: str = "",
        timeout_s: float,
        understood: bool = False,
    ) -> None:
        """Play one episode per seed, greedily, for evaluation.

        Args:
            seeds: The episodes' seeds.
            done: Called for each finished episode with the index of its seed and its outcome.
            environment: The environment's name.
            timeout_s: Deadline for all of them together, in seconds.
            understood: Whether the environment is known to accept the task's actions.

        Raises:
            RolloutError: The time ran out, the policy failed many times in a row, or the environment is gone for good.
        """
        free, size = asyncio.Semaphore(self._places), self._config.rollout.group_size
        health = self.health[environment]
        counts = EpisodeCounts(understood=understood or health.counts.understood)
        ended = without_policy = 0

        async def play(first: int) -> None:
            nonlocal ended, without_policy
            chunk = tuple(seeds[first : first + size])
            async with free:
                if health.is_gone():
                    raise RolloutError(f"the environment is gone: {health.error}") from health.error
                outcomes = await self._play_part(chunk, environment)
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
                for first in range(0, len(seeds), size):
                    group.create_task(play(first))
        except TimeoutError:
            raise RolloutError(
                f"expected {len(seeds)} episodes within {timeout_s:g} s, got {ended}; "
                "raise rollout.timeout_s, or see what the environment is waiting for"
            ) from None
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        counts.require_understood(max(len(seeds), 1))

    async def _play_part(self, seeds: tuple[int, ...], environment: str) -> list[Outcome]:
        """Send episodes to workers until each has an outcome; the caller sets the deadline."""
        episode = EpisodeSettings.of(self._config, environment, temperature=0.0)
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
        """Wait for a free place among the groups in flight, then for a group that admission allows to start."""
        await self._slots.acquire()
        try:
            return await self._buffer.lease()
        except BaseException:
            self._slots.release()
            raise

    def begin(self, lease: GroupLease, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which plays a group, concurrently with the others; its place is free again when it is done."""
        task = asyncio.create_task(work)
        self._plays[task] = lease
        task.add_done_callback(self._ended)

    async def play(self, lease: GroupLease) -> "PlayedGroup | None":
        """Have a worker play the unfinished rest of a group; None if the work was lost and the group awaits another."""
        config, rollouts = self._config, self._config.rollout
        if lease.group in self._kept:
            environment, finished = self._kept.pop(lease.group)
        else:
            environment, finished = self._draw(lease.group), {}
        sampler = self.samplers.get(environment)
        # Which groups of the same weights are back by now depends on timing; that those of older weights are does not.
        known = lease.first if config.deterministic else lease.group
        task = lease.group if sampler is None else sampler.draw(lease.group, known=known)
        seed = task_seed(config.seed, task)
        left = tuple(sibling for sibling in range(rollouts.group_size) if sibling not in finished)
        assignment = Assignment(
            lease=lease.id,
            seeds=(seed,) * len(left),
            siblings=left,
            settings=EpisodeSettings.of(config, environment, temperature=rollouts.temperature),
            environment=environment,
            task=task,
            sampling_key=(config.seed, lease.group) if config.deterministic else None,
            fork_turn=rollouts.fork_turns and draw_fork_turn(config.seed, lease.group, rollouts.fork_turns),
        )
        try:
            async with asyncio.timeout(config.call_timeout_s):
                result: AssignmentResult = await self._rollout.play.route(assignment)
        except (ReplicaLostError, NoReplicaError, TimeoutError) as error:
            self._losses.add(lease.group, str(error) or "their worker does not answer")
            if not self._buffer.lose(lease, floor=lease.floor if finished else None):
                self._end_task(lease.group)
            elif finished:
                self._kept[lease.group] = environment, finished
            if isinstance(error, TimeoutError):
                self._cut([lease])
            return None
        await self._tell_first_failure(environment, result)
        return PlayedGroup(
            environment, seed, finished | dict(zip(left, result.outcomes, strict=True)), result
        )

    async def settle(self, lease: GroupLease, played: "PlayedGroup") -> None:
        """Add a group to the buffer, drop it, or have another worker play what this one left unfinished.

        Raises:
            RolloutError: Too many groups are dropped, in this environment and all others: going on would not help.
        """
        outcomes, result, health = played.outcomes, played.result, self.health[played.environment]
        # None of the siblings that share a beginning is kept: those of another worker begin elsewhere.
        finished = {} if self._config.rollout.fork_turn else final_outcomes(outcomes.items())
        if result.preempted and len(finished) < len(outcomes):
            if self._buffer.give_back(lease, floor=lease.floor if finished else None):
                health.counts.attempted(result)
                if finished:
                    self._kept[lease.group] = played.environment, finished
            else:
                self._end_task(lease.group)
            return
        trajectories = [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Trajectory)]
        group = Group(
            id=lease.group, seed=played.seed, environment=played.environment, trajectories=trajectories
        )
        if len(trajectories) < self._config.rollout.min_group_size:
            refusal: str | None = f"{TOO_FEW}: {summary(outcomes.values())}"
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
            health.counts.attempted(result)
        episodes = self._config.rollout.group_size * self._buffer.admission.groups_per_batch
        try:
            health.ended(outcomes.values(), refusal, current=current, episodes=episodes)
        except RolloutError as error:
            self.set_aside(played.environment, error)

    def _end_task(self, group: int, signals: Mapping[str, float | None] = MappingProxyType({})) -> None:
        # In all samplers: the group may have a task of an environment set aside since, and one of another environment.
        for name, sampler in self.samplers.items():
            sampler.end(group, signals.get(name))

    def _draw(self, group: int) -> str:
        """Draw the environment of a group that starts now; while none is set aside it depends on the number alone."""
        names = playable(self.health, now=asyncio.get_running_loop().time()) or list(self.health)
        weights = {name: self._weights[name] for name in names}
        return draw_environment(self._config.seed, group, weights)

    async def _tell_first_failure(self, environment: str, result: AssignmentResult) -> None:
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

    def _cut(self, leases: Sequence[GroupLease]) -> None:
        cut = asyncio.ensure_future(self._tell_to_stop(tuple(lease.id for lease in leases)))
        self._cuts.add(cut)
        cut.add_done_callback(self._cuts.discard)

    async def _tell_to_stop(self, leases: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._rollout.cut.fanout(leases)
        except Exception as error:  # a worker that cannot be reached is gone, or its group is dropped anyway
            logger.info("workers could not be told to stop: %s", error)

    async def _recall(self) -> None:
        """Cancel the groups in flight and tell the workers to stop playing them."""
        plays = dict(self._plays)
        for task in plays:
            task.cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        if plays:
            self._cut(list(plays.values()))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Free the place of a task that is over; an error in it ends the rollouts."""
        if self._plays.pop(task, None) is not None:
            self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._buffer.fail(error)
