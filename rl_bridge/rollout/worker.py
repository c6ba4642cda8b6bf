"""Rollout workers: they play the episodes of assignments concurrently, one session each, and return the outcomes."""

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from openenv_core.errors import AccessRefusedError, AuthenticationError, ClientError, ValidationFailedError
from openenv_core.tracing import traced
from rl_bridge.config import resolve
from rl_bridge.config.self_play import POLICY, SERVER, trained_seats
from rl_bridge.environments.leases import LeasedSession, SessionLeases
from rl_bridge.errors import (
    EpisodeLostError,
    EpisodeUnscoredError,
    GeneratorError,
    NoReplicaError,
    PromptRefusedError,
    ReplicaLostError,
    RolloutError,
)
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.assignment import (
    Absence,
    Assignment,
    AssignmentResult,
    EpisodeSettings,
    NoTrajectory,
    Outcome,
)
from rl_bridge.rollout.episode import Judge, back_off, play_episode, shorten_reason
from rl_bridge.rollout.opponents import Player as Opponent
from rl_bridge.rollout.opponents import play_opponent
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.table import Table
from rl_bridge.rollout.task import Session, Task
from rl_bridge.services import own_process
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens
from rl_bridge.types import Ending, Trajectory, Turn

if TYPE_CHECKING:
    from rl_bridge.agents.player import AgentPlayer

T = TypeVar("T")
StartT = TypeVar("StartT")
POLICIES: Final = "policies"
"""The option of a reset with the server's policies, by seat (docs/players.md)."""
UNTRAINED: Final = 2**32
"""Where the numbers of opponents begin in the seeds of their completions, beyond those of siblings."""
KeepTokens = Callable[[dict[TokenKey, TrajectoryTokens]], Awaitable[None]]
"""Hands the tokens of trajectories to who keeps them until they are trained."""


@dataclass(slots=True)
class ActiveAssignment:
    """An assignment in progress.

    Attributes:
        progressed_at: When one of its episodes last got on, by the event loop's clock.
        waiting: How many of its episodes wait for what other assignments hold.
    """

    assignment: Assignment
    progressed_at: float
    waiting: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    retried: int = 0
    last_failure: str | None = None


class Player(ABC, Generic[StartT]):
    """Plays the episodes of an assignment concurrently; each is tried up to `max_attempts` times, then dropped.

    With `keep_tokens` it hands their tokens over, and returns summaries in their place; tokens of held-out episodes are
    dropped.
    """

    def __init__(
        self, policy: ChatPolicy, *, max_attempts: int, keep_tokens: KeepTokens | None = None
    ) -> None:
        self.policy = policy
        self._max_attempts = max_attempts
        self._keep_tokens = keep_tokens
        self._active: dict[int, ActiveAssignment] = {}
        self._progressed_at = 0.0
        self._preempted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    async def begin(self, active: ActiveAssignment, policy: ChatPolicy, stack: AsyncExitStack) -> StartT:
        """Do the common work of an assignment's episodes; `stack` is closed when all of them are done."""

    @abstractmethod
    async def attempt(
        self, indices: Sequence[int], active: ActiveAssignment, policy: ChatPolicy, start: StartT
    ) -> list[Outcome]:
        """Play the episodes at these indices of an assignment, one or those of a table; return their outcomes."""

    async def play(self, assignment: Assignment) -> AssignmentResult:
        """Play episodes until all are done, or `cancel` or `preempt` stops them.

        A call after `preempt` never returns: this worker would be the least loaded of all, and the same work would come
        back at once. The caller's call fails when the process ends.

        Raises:
            RolloutError: The environment refuses the requests, so that retrying cannot help.
            PromptRefusedError: The engine refuses the prompt.
            ReplicaLostError: Who keeps the tokens is gone.
        """
        if self._preempted.is_set():
            await asyncio.get_running_loop().create_future()
        now = asyncio.get_running_loop().time()
        active = self._active[assignment.lease] = ActiveAssignment(assignment, now)
        outcomes: list[Outcome | None] = [None] * len(assignment.seeds)
        self._idle.clear()
        try:
            async with AsyncExitStack() as stack:
                policy = stack.enter_context(self.policy.pin_replica())
                (start,) = await run_until_stopped([self.begin(active, policy, stack)], active.stop)
                if start is not None:
                    tables = assignment.tables
                    attempts = [self.attempt(indices, active, policy, start) for indices in tables]
                    played = await run_until_stopped(attempts, active.stop)
                    for indices, table_outcomes in zip(tables, played, strict=True):
                        for index, outcome in zip(indices, table_outcomes or (), strict=False):
                            outcomes[index] = outcome
            if self._keep_tokens is not None:
                outcomes = await self._hand_over(assignment, outcomes, self._keep_tokens)
        finally:
            del self._active[assignment.lease]
            if not self._active:
                self._idle.set()
        unfinished = NoTrajectory(absence=Absence.UNFINISHED, reason="its worker was told to stop")
        return AssignmentResult(
            lease=assignment.lease,
            outcomes=tuple(outcome or unfinished for outcome in outcomes),
            retried=active.retried,
            last_failure=active.last_failure,
            preempted=self._preempted.is_set(),
        )

    @staticmethod
    async def _hand_over(
        assignment: Assignment, outcomes: Sequence[Outcome | None], keep_tokens: KeepTokens
    ) -> list[Outcome | None]:
        lease = None if assignment.task is None else assignment.lease  # held-out episodes are not trained
        without_tokens: list[Outcome | None] = []
        tokens: dict[TokenKey, TrajectoryTokens] = {}
        for sibling, outcome in zip(assignment.siblings, outcomes, strict=True):
            if isinstance(outcome, Trajectory):
                if lease is not None:
                    tokens[lease, sibling] = TrajectoryTokens.of(outcome.turns)
                outcome = outcome.without_tokens(lease=lease, sibling=sibling)
            without_tokens.append(outcome)
        if tokens:
            await keep_tokens(tokens)
        return without_tokens

    def playing(self) -> dict[int, float]:
        """Return, by lease, for how many seconds each assignment in progress has made no progress.

        One with an episode that waits for what other assignments hold gets on when they do.
        """
        now = asyncio.get_running_loop().time()
        return {
            lease: now - max(active.progressed_at, self._progressed_at if active.waiting else 0.0)
            for lease, active in self._active.items()
        }

    def record_progress(self, active: ActiveAssignment) -> None:
        """Record that an episode got a session, an answer or a result of its environment."""
        active.progressed_at = self._progressed_at = asyncio.get_running_loop().time()

    @contextmanager
    def wait_for_turn(self, active: ActiveAssignment) -> Iterator[None]:
        """In the block an episode waits for what others hold; it has got it if the block does not raise."""
        active.waiting += 1
        try:
            yield
        finally:
            active.waiting -= 1
        self.record_progress(active)

    def cancel(self, leases: Iterable[int]) -> None:
        """Stop the assignments of these leases: they return what is finished. Unknown leases are ignored."""
        for lease in leases:
            if (active := self._active.get(lease)) is not None:
                active.stop.set()

    async def preempt(self) -> None:
        """Stop all assignments for preemption, each returning what is finished; wait until all have returned."""
        self._preempted.set()
        self.cancel(list(self._active))
        await self._idle.wait()

    async def retry(
        self, active: ActiveAssignment, policy: ChatPolicy, play: Callable[[int, ChatPolicy], Awaitable[T]]
    ) -> T | NoTrajectory:
        """Call `play` with the attempt's number until no environment or engine fails; NoTrajectory after the last."""
        failure, ending = "", Ending.FAILED_ENVIRONMENT
        for number in range(self._max_attempts):
            if number:
                with span("back off", waits_for="environment"):
                    await back_off(number)
            try:
                with policy.pin_replica() as pinned_policy:
                    return await play(number, pinned_policy)
            except PromptRefusedError:
                raise
            except (ClientError, EpisodeLostError, GeneratorError, NoReplicaError, ReplicaLostError) as error:
                # Retrying cannot help. A refused action, which the policy wrote, is handled in the episode.
                if isinstance(error, AuthenticationError | AccessRefusedError | ValidationFailedError):
                    raise RolloutError(f"the environment refuses the request: {error}") from error
                # Another attempt has its own time; but others that wait have not got nearer to their turn.
                active.progressed_at = asyncio.get_running_loop().time()
                failure = active.last_failure = shorten_reason(f"{type(error).__name__}: {error}")
                is_environment_error = isinstance(error, ClientError | EpisodeLostError)
                ending = Ending.FAILED_ENVIRONMENT if is_environment_error else Ending.FAILED_POLICY
                active.retried += 1
        return NoTrajectory(absence=Absence.DROPPED, reason=failure, ending=ending)


class EpisodePlayer(Player[EpisodeSettings]):
    """A player whose episodes have nothing in common but how they are played; each begins with a reset of its own."""

    async def begin(
        self, active: ActiveAssignment, policy: ChatPolicy, stack: AsyncExitStack
    ) -> EpisodeSettings:
        """See `Player.begin`."""
        return active.assignment.settings


class RolloutWorker(EpisodePlayer):
    """Plays assignments, each episode in a leased session of its own.

    If a session fails or reports an infrastructure failure, it is replaced by a fresh one and its episode is retried
    with the answers that the policy has given. An episode that keeps failing is dropped and counted: infrastructure
    failures are never scored as play. An episode that the environment cannot score is left out and counted separately.

    In self-play one session has all seats of a table, each of which is an episode. An episode whose table another seat
    left before its end, for example by an answer that is no action, has no result and counts as unscored. Seats that
    are not trained are played by opponents: the policy, a function, or the generator of `opponent`.

    The sessions bound the episodes in flight. The judge, if any, returns a reward that is added to the environment's.
    With `agents`, an agent plays in place of our own dialogue, and a retried episode is sampled anew.
    """

    def __init__(
        self,
        sessions: SessionLeases,
        *,
        task: Task,
        policy: ChatPolicy,
        max_attempts: int,
        judge: Judge | None = None,
        agents: "AgentPlayer | None" = None,
        keep_tokens: KeepTokens | None = None,
        opponent: ChatPolicy | None = None,
    ) -> None:
        super().__init__(policy, max_attempts=max_attempts, keep_tokens=keep_tokens)
        self._agents = agents
        self._opponent = opponent
        self._sessions = sessions
        self._task = task
        self._judge = judge

    async def attempt(
        self, indices: Sequence[int], active: ActiveAssignment, policy: ChatPolicy, settings: EpisodeSettings
    ) -> list[Outcome]:
        """Play one episode, or one table, in a fresh session after each failure that is not the policy's."""
        answers: dict[int, list[tuple[Turn, str]]] = {index: [] for index in indices}

        async def play(number: int, pinned_policy: ChatPolicy) -> list[Outcome]:
            assignment = active.assignment
            async with AsyncExitStack() as stack:
                with self.wait_for_turn(active):
                    session = await stack.enter_async_context(self._sessions.lease(order=assignment.group))
                first = indices[0]
                attributes = {"seed": assignment.seeds[first], "sibling": assignment.siblings[first]}
                with traced("rollout", **attributes, lease=assignment.lease, attempt=number):
                    if assignment.seatings:
                        return await self._play_table(session, active, pinned_policy, settings, answers)
                    return [await self._play(session, first, active, pinned_policy, settings, answers[first])]

        outcome = await self.retry(active, policy, play)
        return [outcome] * len(indices) if isinstance(outcome, NoTrajectory) else outcome

    def record_progress(self, active: ActiveAssignment) -> None:
        """See `Player.record_progress`."""
        super().record_progress(active)
        self._sessions.record_progress()

    async def _play_table(
        self,
        session: LeasedSession,
        active: ActiveAssignment,
        policy: ChatPolicy,
        settings: EpisodeSettings,
        answers: Mapping[int, list[tuple[Turn, str]]],
    ) -> list[Outcome]:
        """Play all seats of one table at once, the trained ones as episodes; `answers` are those of each, in order."""
        assignment, first = active.assignment, next(iter(answers))
        seating = assignment.seating_of(first)
        served = {
            seat: name.removeprefix(SERVER) for seat, name in seating.items() if name.startswith(SERVER)
        }
        if served:
            policies = settings.reset_options.get(POLICIES, {}) | served
            settings = replace(settings, reset_options={**settings.reset_options, POLICIES: policies})
        seats = [seat for seat in seating if seat not in served]
        table = Table(session, seats, self._task.client_type.observation_type)
        episodes = dict(zip(trained_seats(seating), answers, strict=True))
        key = assignment.sampling_key

        async def play(seat: str, index: int) -> Outcome:
            outcome = await self._play(table.seat(seat), index, active, policy, settings, answers[index])
            table.leave(seat)
            return outcome if isinstance(outcome, NoTrajectory) else replace(outcome, seat=seat)

        async def oppose(seat: str) -> None:
            number = UNTRAINED + assignment.siblings[first] * len(seats) + seats.index(seat)
            with self._pin_player(seating[seat], policy) as player:
                await play_opponent(
                    table.seat(seat),
                    player,
                    self._task,
                    seed=assignment.seeds[first],
                    settings=settings,
                    sampling_key=None if key is None else (*key, number),
                    on_progress=partial(self.record_progress, active),
                )
            table.leave(seat)

        plays = [play(seat, episodes[seat]) if seat in episodes else oppose(seat) for seat in seats]
        outcomes = await run_until_stopped(plays, asyncio.Event())
        # Not before all seats have ended: one may be out while others go on to earn.
        return [
            outcome
            if isinstance(outcome, NoTrajectory)
            else replace(outcome, others=table.earned_by_others(outcome.seat))
            for outcome in outcomes
            if outcome is not None
        ]

    @contextmanager
    def _pin_player(self, name: str, policy: ChatPolicy) -> Iterator[Opponent]:
        """Return who plays an untrained seat: the policy, the opponents' generator, or a function."""
        if name == POLICY:
            yield policy
        elif ":" in name:
            yield resolve(name, key="env.seats")
        elif self._opponent is None:
            raise RolloutError(f"expected a generator to play {name}, there is none")
        else:
            with self._opponent.pin_replica() as pinned_opponent:
                yield pinned_opponent

    async def _play(
        self,
        session: Session,
        index: int,
        active: ActiveAssignment,
        policy: ChatPolicy,
        settings: EpisodeSettings,
        answers: list[tuple[Turn, str]],
    ) -> Outcome:
        assignment, key = active.assignment, active.assignment.sampling_key
        play = (
            partial(play_episode, task=self._task, answers=answers)
            if self._agents is None
            else self._agents.play
        )
        try:
            outcome = await play(
                session,
                policy,
                seed=assignment.seeds[index],
                settings=settings,
                sampling_key=None if key is None else (*key, assignment.siblings[index]),
                judge=self._judge,
                on_progress=partial(self.record_progress, active),
                wait_for_turn=partial(self.wait_for_turn, active),
            )
        except EpisodeUnscoredError as reason:
            # Not retried: the policy has played, and retrying until a score comes would bias the episodes.
            return NoTrajectory(
                absence=Absence.UNSCORED, reason=shorten_reason(str(reason)), ending=Ending.FAILED_REWARD
            )
        return outcome or NoTrajectory(
            absence=Absence.NO_TURN,
            reason="the episode was over after its reset, its first prompt leaves no room for an answer "
            "(rollout.max_length), or it timed out before the first turn (rollout.episode_timeout_s)",
        )


class NoMainLoopError(RuntimeError):
    """The main thread of this process runs no event loop that a signal could wake."""


async def on_termination(notify: Callable[[], None]) -> None:
    """Have SIGTERM call `notify` on the running event loop, in place of its previous handler.

    Python handles signals in the main thread only. In a Monarch process that thread runs an event loop, and actors run
    on another thread's; so the handler is installed on the main thread's loop and calls back to this one.

    Raises:
        NoMainLoopError: The loop of the main thread is not known.
    """
    loop = asyncio.get_running_loop()
    if (main := own_process.main_loop()) is None:
        raise NoMainLoopError(
            "expected an event loop in the main thread to take SIGTERM, found none; "
            "set rollout.checkpoint_on_preemption=false"
        )
    installed: asyncio.Future[None] = loop.create_future()

    def install() -> None:
        main.add_signal_handler(signal.SIGTERM, loop.call_soon_threadsafe, notify)
        loop.call_soon_threadsafe(installed.set_result, None)

    main.call_soon_threadsafe(install)
    await installed


async def run_until_stopped(works: Sequence[Coroutine[Any, Any, T]], stop: asyncio.Event) -> list[T | None]:
    """Run coroutines concurrently until all are done or `stop` is set.

    Returns their results in order, None for those that were stopped. If one raises, the others are cancelled and its
    exception is raised.
    """
    stop_wait = asyncio.ensure_future(stop.wait())
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        pending: set[asyncio.Future[Any]] = set(tasks)
        while pending and not stop_wait.done():
            done, pending = await asyncio.wait({*pending, stop_wait}, return_when=asyncio.FIRST_COMPLETED)
            pending.discard(stop_wait)
            for task_done in done:
                task_done.result()
    finally:
        for task in (stop_wait, *tasks):
            task.cancel()
        await asyncio.gather(stop_wait, *tasks, return_exceptions=True)
    return [None if task.cancelled() or task.exception() is not None else task.result() for task in tasks]
