"""A table: one episode of a game with several seats, and the players at it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final, TypeAlias

from openenv_core import Observation
from openenv_core.errors import EnvironmentFailureError
from openenv_core.multi_agent import FORFEIT, MultiAgentEnvironment, SeatPolicy
from openenv_core.protocol.errors import VALIDATION_ERROR, RefusalError, text_of
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.watchdog import Watchdog
from servers.execution import keep
from servers.threads import ThreadPool, contain, containable, max_threads

logger = logging.getLogger("servers")

Game: TypeAlias = MultiAgentEnvironment[Any, Any, Any]

SEAT: Final = "seat"
"""Key of an observation's metadata: the seat that sees it."""

TURN: Final = "turn"
"""Key of an observation's metadata: the player's seats that have to act, of which it may act for several at once."""

OTHERS: Final = "others"
"""Key of an observation's metadata: what the player's other seats have seen since the last reply."""

_NOT_SENT: Final = {"done", "reward", "metadata"}

_THREADS: Final = ThreadPool(max_threads(), "game")
"""Threads of all games that may block: one that hangs delays neither the others nor the end of the server."""

_MAX_MOVES: Final = 100
"""Moves of the server's policies in one call on the event loop; the loop serves others before the next ones."""


class Player:
    """A session at a table, with one seat or several.

    Args:
        seats: The seats that it plays.
        on_absence: Called if the player has not acted in time.

    Attributes:
        turn: Its seats that have to act, by the last reply; none while it waits.
        waiter: The reply that it waits for, if any.
        steps: Steps taken.
        watchdog: Limits the time that it has to act; None where nobody waits for it.
    """

    __slots__ = ("on_absence", "seats", "steps", "turn", "waiter", "watchdog")

    def __init__(self, seats: tuple[str, ...], on_absence: Callable[[], None]) -> None:
        self.seats = seats
        self.on_absence = on_absence
        self.turn: Sequence[str] = ()
        self.steps = 0
        self.waiter: asyncio.Future[Any] | None = None
        self.watchdog: Watchdog | None = None


class GameTable:
    """One episode of a game, on the event loop.

    A game that may block is called in a thread, one call at a time. A call goes on to its end if its caller is
    cancelled.

    Args:
        game_type: The class of the game.
        policies: The policies of the seats that no session plays.
        options: Options of the game's `reset`.
        make_game: Returns the game, which plays no other episode meanwhile; None makes one, which ends with the table,
            where several sessions may meet.
        lock: Held during each call of the game in a thread.

    Attributes:
        options: Options of the game's `reset`.
        policies: The policies of the seats that no session plays.
        players: The sessions at it.
        over: Whether no action may follow.
        seed: Seed of the episode, once it has begun.
        timer: Ends the wait for players, while they gather.
    """

    def __init__(
        self,
        game_type: type[Game],
        policies: Mapping[str, SeatPolicy],
        options: Mapping[str, Any],
        make_game: Callable[[], Game] | None = None,
        lock: asyncio.Lock | None = None,
    ) -> None:
        self.options = options
        self.players: list[Player] = []
        self.over = False
        self.seed: int | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._game_type = game_type
        self._seats = frozenset(game_type.seats)
        self._has_check = game_type.check is not MultiAgentEnvironment.check
        self._shared = make_game is None
        self._make_game = make_game or game_type
        self._game: Any = None
        self.policies = dict(policies)
        self._rng = Random(0)
        self._unseen: dict[str, Any] = {}  # rewards since a seat's last reply, if it has seen anything
        self._turn: Sequence[str] = ()  # without those that have ended
        self._expected = 0  # actions of players that the game waits for
        self._continuing: asyncio.Handle | None = None  # the policies' next moves
        self._changed = False  # since players were woken
        self._latest: dict[str, Observation] = {}
        self._actions: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._vacant: list[str] = []  # seats whose players have left
        self._begun = False
        self._failure: str | None = None
        self._lock = lock or asyncio.Lock()

    @property
    def free_seats(self) -> list[str]:
        """The seats that nobody plays."""
        taken = {seat for player in self.players for seat in player.seats} | self.policies.keys()
        return [seat for seat in self._game_type.seats if seat not in taken]

    def add(self, player: Player) -> None:
        """Give a player its seats, which are free."""
        self.players.append(player)
        if self._shared:
            player.watchdog = Watchdog(self._game_type.TURN_TIMEOUT_S, player.on_absence)

    # Playing

    def begin(self, player: Player) -> Observation | Awaitable[Observation]:
        """Begin the episode, and play up to the first turn of a player; returns and raises as `act`."""
        if self.timer is not None:
            self.timer.cancel()
        self._begun = True
        return self._run(self._begin, player)  # type: ignore[no-any-return]

    def act(self, player: Player, actions: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Take the actions of a player, by seat, of seats whose turn it is, and play on.

        Returns:
            What the player is shown next, which asks it to act or ends its episode; or an awaitable of that.

        Raises:
            EnvironmentFailureError: The game failed at a table of several players.
            Exception: Whatever the game raised; the player may try again.
        """
        if self._game_type.BLOCKING:
            return self._act_in_thread(player, actions)
        if self._has_check:
            self._check(actions)
        self._accept(player)
        self._actions.update(actions)
        if len(self._actions) < self._expected and not self.over:
            # None of the game's seats is shown anything; a player of several may have to act for the next.
            return self.wait(player) if len(player.seats) == 1 else self._reply_or_wait(player)
        self._call(self._advance)
        return self._wake_and_reply(player)  # type: ignore[no-any-return]

    async def _act_in_thread(self, player: Player, actions: Mapping[str, Any]) -> Observation:
        if self._has_check:
            await asyncio.shield(self._start_in_thread(partial(self._check, actions)))
        self._accept(player)
        reply: Observation = await self._run(partial(self._take_actions, actions), player)
        return reply

    def _check(self, actions: Mapping[str, Any]) -> None:
        """Raise what the game raises of an action; a ValueError as a refusal, which says that nothing was done."""
        if not self.over:  # it may have ended while the player thought
            try:
                for seat, action in actions.items():
                    self._game.check(seat, action)
            except ValueError as error:
                raise RefusalError(VALIDATION_ERROR, text_of(error)) from None

    def _accept(self, player: Player) -> None:
        """Stop the time of a player that acts."""
        assert player.turn  # it has not lost its seats during the check
        if player.watchdog is not None:
            player.watchdog.stop()
        player.turn = ()
        player.steps += 1

    def _run(self, work: Callable[[], None], player: Player | None = None) -> Any:
        """Call the game, and wake players for whom there is something; return what `player` is shown, or will be."""
        if self._game_type.BLOCKING:
            then = partial(self._wake_and_reply, player)
            return _await_reply(self._start_in_thread(partial(self._call, work), then))
        self._call(work)
        return self._wake_and_reply(player)

    def _start_in_thread(
        self, function: Callable[[], None], then: Callable[[], Any] = lambda: None
    ) -> asyncio.Task[Any]:
        """Call a function in a thread, and then another one here, before the next such call begins."""
        return start_in_thread(self._lock, function, lambda _: then())

    def _wake_and_reply(self, player: Player | None) -> Any:
        self._wake()
        return self._reply_or_wait(player)

    def _reply_or_wait(self, player: Player | None) -> Any:
        if player is None or player not in self.players:
            return None
        reply = self._reply(player)
        return self.wait(player) if reply is None else reply

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if not self._shared:
                self._actions = {}
                for player in self.players if self._latest else ():
                    player.steps -= 1
                    player.turn = self._turn_of(player)
                raise
            self._fail(error)
        if self.over and self._shared and self._game is not None:
            game, self._game = self._game, None
            try:
                game.close()
            except BaseException:
                logger.exception("closing %s failed", self._game_type.__name__)

    def _fail(self, error: BaseException) -> None:
        """End the episode for all, since the game failed; its error may hold what no seat may see."""
        name = self._game_type.__name__
        if isinstance(error, InvalidResetOptionError):
            self._end(str(error))
        else:
            logger.error("%s failed at a table of several players", name, exc_info=error)
            self._end(f"{name} failed, and its episode is over; the server's log says why")

    def _end(self, failure: str) -> None:
        self.over = self._changed = True
        self._failure = failure

    def _begin(self) -> None:
        if self._game is None:
            self._game = self._make_game()
        observations = self._game.reset(**self.options)
        self.seed = self._game.state.seed
        self._rng = Random(str(self.seed))
        self._take(observations)
        self._advance()

    def _take_actions(self, actions: Mapping[str, Any]) -> None:
        self._actions.update(actions)
        self._advance()

    def _advance(self) -> None:
        """Play until a player has to act, or all that sit here have ended."""
        moves = 0
        while not (self.over or ((self._ended or not self.players) and self._have_all_ended())):
            if self._vacant:
                self._replace(self._vacant.pop())
                continue
            if not self._turn:
                raise EnvironmentFailureError(
                    f"it is nobody's turn in {self._game_type.__name__}; see its `turn`"
                )
            actions = self._actions
            if len(actions) < self._expected:
                return
            if not self._expected:
                moves += 1
                if moves > _MAX_MOVES and not self._game_type.BLOCKING:
                    self._continue_later()
                    return
            if self._expected < len(self._turn):
                for seat in self._turn:
                    if seat not in actions:
                        actions[seat] = self.policies[seat](self._latest[seat], self._rng)
            self._actions = {}
            self._take(self._game.step(actions))
        self.over = True

    def _have_all_ended(self) -> bool:
        """Whether no player is left that can be shown anything."""
        return all(self._ended.issuperset(each.seats) for each in self.players)

    def _continue_later(self) -> None:
        """Have the policies play on once the event loop has served others."""
        if self._continuing is None:
            self._continuing = asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._continuing = None
        try:
            self._run(self._advance)
        except BaseException as error:  # of a game for one session, which waits
            for player in self.players:
                if player.waiter is not None and not player.waiter.done():
                    player.waiter.set_exception(_contained(error))

    def _take(self, observations: Any) -> None:
        """Keep what each seat sees, as the game returns it."""
        name = self._game_type.__name__
        if type(observations) is not dict and not isinstance(observations, Mapping):
            kind = type(observations).__name__
            raise EnvironmentFailureError(f"{name} returned {kind}, not the observations by seat")
        seats, ended, unseen = self._game_type.seats, self._ended, self._unseen
        for seat in seats:
            if seat in ended:
                continue
            if (observation := observations.get(seat)) is None:
                raise EnvironmentFailureError(f"{name} returned no observation for the seat {seat!r}")
            self._latest[seat] = observation
            if observation.done:
                ended.add(seat)
            reward, before = observation.reward, unseen.get(seat)
            unseen[seat] = reward if before is None else before if reward is None else before + reward
        self._changed = True
        self.over = len(ended) == len(seats)
        turn = tuple(self._game.turn)
        if turn != self._turn or ended:
            if not self._seats.issuperset(turn):
                raise EnvironmentFailureError(
                    f"{name}.turn is a sequence of seats, such as {tuple(self._game_type.seats[:1])}, not "
                    f"{self._game.turn!r:.80}"
                )
            # At the end, the seat that would act next is shown first.
            self._turn = tuple(seat for seat in dict.fromkeys(turn) if self.over or seat not in ended)
            self._count_expected()

    def _count_expected(self) -> None:
        self._expected = (
            sum(seat not in self.policies for seat in self._turn) if self.policies else len(self._turn)
        )

    # Replies

    def _reply(self, player: Player) -> Observation | None:
        """Return what a player is shown next; None if it has to wait. EnvironmentFailureError: The game failed."""
        if self._failure is not None:
            raise EnvironmentFailureError(self._failure)
        player.turn = turn = self._turn_of(player)
        done = False
        if turn:
            seat = turn[0]
            if player.watchdog is not None:
                player.watchdog.start()
        elif done := self._ended.issuperset(player.seats):
            seat = next((each for each in self._turn if each in player.seats), player.seats[0])
        else:
            return None
        observation, unseen = self._latest[seat], self._unseen
        reward = unseen.pop(seat, None)
        if len(player.seats) == 1:
            return (
                observation if reward == observation.reward else _copy_with(observation, {"reward": reward})
            )
        others = {
            each: _describe(self._latest[each], unseen.pop(each)) for each in player.seats if each in unseen
        }
        metadata = {**observation.metadata, SEAT: seat, TURN: turn, OTHERS: others}
        return _copy_with(observation, {"reward": reward, "done": done, "metadata": metadata})

    def _turn_of(self, player: Player) -> Sequence[str]:
        """Return a player's seats that have to act."""
        if self.over:
            return ()
        seats, acted = player.seats, self._actions
        if not acted and len(seats) == len(self._seats):
            return self._turn
        return [seat for seat in self._turn if seat in seats and seat not in acted]

    def wait(self, player: Player) -> asyncio.Future[Any]:
        """Return a future of a player's next turn, or of the end of its episode."""
        player.waiter = asyncio.get_running_loop().create_future()
        return player.waiter

    def _wake(self) -> None:
        """Give the players that wait the replies that there are."""
        if not self._changed:
            return
        self._changed = False
        for player in self.players:
            if (waiter := player.waiter) is not None and not waiter.done():
                try:
                    if (reply := self._reply(player)) is not None:
                        waiter.set_result(reply)
                except EnvironmentFailureError as error:
                    waiter.set_exception(error)
                if waiter.done():
                    player.waiter = None  # no fork could copy it

    # Players that leave

    def leave(self, player: Player) -> Awaitable[None] | None:
        """Take a player off, and go on as the class declares; returns an awaitable if that takes a thread."""
        self.players = [each for each in self.players if each is not player]
        if player.watchdog is not None:
            player.watchdog.close()
        if self.over or not self._begun or not self._shared:
            return None
        return self._run(partial(self._vacate, player))  # type: ignore[no-any-return]

    def _vacate(self, player: Player) -> None:
        for seat in player.seats:
            self._actions.pop(seat, None)
            if seat not in self._ended:
                self._vacant.append(seat)
        self._advance()

    def cancel(self, reason: str) -> None:
        """End a table whose episode has not begun."""
        self._end(reason)
        self._wake()

    def _replace(self, seat: str) -> None:
        """Do what the class declares where the player of a seat has left."""
        declared = self._game_type.ABSENT
        if (policy := self._game_type.POLICIES.get(declared)) is not None:
            self.policies[seat] = policy
            self._count_expected()
        elif declared == FORFEIT:
            last = self._game.forfeit(seat)
            self._take({each: _end_of(observation) for each, observation in last.items()})
        else:
            cut = {"done": True, "truncated": True, "terminated": False, "reward": None}
            self._take({each: last.model_copy(update=cut) for each, last in self._latest.items()})


def start_in_thread(
    lock: asyncio.Lock, function: Callable[[], Any], then: Callable[[Any], Any] = lambda result: result
) -> asyncio.Task[Any]:
    """Call a function in a thread, and `then` with its result here, before the next call under the lock begins."""

    async def call() -> Any:
        async with lock:
            succeeded, result = await _THREADS.run(function)
            if not succeeded:
                raise _contained(result)
            return then(result)

    return keep(asyncio.create_task(call()))


def _contained(error: BaseException) -> Exception:
    """Return an exception of a game as a task or a future may have it; a SystemExit there would end the server."""
    found = containable(error)
    return contain(found) if isinstance(found, SystemExit) else found


def _end_of(observation: Observation) -> Observation:
    """Return a last observation, which its author may not have marked as one."""
    if observation.done:
        return observation
    return observation.model_copy(update={"done": True, "terminated": True})


def _describe(observation: Observation, reward: Any) -> dict[str, Any]:
    """Return what a seat has seen, for the player's reply to another of its seats."""
    dump = observation.__pydantic_serializer__.to_python  # as `model_dump`, in two thirds of the time
    return {
        "observation": dump(observation, mode="json", exclude=_NOT_SENT),
        "reward": reward,
        "terminated": observation.terminated,
        "truncated": observation.truncated,
    }


def _copy_with(observation: Observation, fields: Mapping[str, Any]) -> Observation:
    """Return a copy with other values, as `model_copy` does in twice the time."""
    copied = observation.__copy__()
    vars(copied).update(fields)
    return copied


async def _await_reply(running: asyncio.Task[Any]) -> Any:
    reply = await asyncio.shield(running)
    return await reply if isinstance(reply, asyncio.Future) else reply
