"""A game with several seats as sessions: each is an ordinary `Environment`, whose step waits for the next turn."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from types import new_class
from typing import Annotated, Any, ClassVar, Final, Generic, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, create_model

from openenv_core import Environment, EnvironmentMetadata, Observation, State
from openenv_core.environment import StateT
from openenv_core.errors import ConfigurationError, EpisodeOverError
from openenv_core.lifecycle import models_of
from openenv_core.multi_agent import MultiAgentEnvironment, SeatPolicy
from openenv_core.protocol.errors import VALIDATION_ERROR, RefusalError
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.types import ActT, ObsT
from servers.execution import keep
from servers.seats.table import GameTable, Player, start_in_thread

MAX_NAME_CHARS: Final = 200
"""Longest name of a table."""

ALL: Final = "all"


class SeatActions(BaseModel, Generic[ActT]):
    """The step of a session that acts for several of its seats at once.

    Attributes:
        seats: An action for each of these seats.
    """

    model_config = ConfigDict(extra="forbid")

    seats: Annotated[dict[str, ActT], Field(min_length=1)]


class SeatState(State):
    """The state of a session at a table; nothing of the game's own state, which other seats may not see.

    Attributes:
        seat: The seats that the session plays.
        turn: Those of its seats that have to act; empty while it waits.
        table: The name of the table; None if no other session can sit there.
    """

    seat: list[str] = Field(default_factory=list)
    turn: list[str] = Field(default_factory=list)
    table: str | None = None


class SeatEnvironment(Environment[ActT, ObsT, StateT]):
    """A session's place in a game.

    `reset` takes, beside the game's options, `seed` and `episode_id`:

    - `seat`: the seats to play: a name, a list of names, or "all". By default the first; all where the class has no
      policies to play the others; at a named table the first free one.
    - `table`: the name of a table, of the clients' choice, at which other sessions may take seats. The episode begins
      once all seats are taken, with the seed and options of the session that came first. The next session that names
      the table gathers players for another episode. None: nobody else sits here.
    - `policies`: names of the class's policies by seat. Without a table, seats that nobody has are played by the first.

    A session that plays several seats acts for one after another, or, by `SeatActions`, for those at once that are in
    its metadata's `turn`. Each observation is that of the seat in the metadata's `seat`, the first of them, with the
    reward of that seat since the last reply; `others` there has what the session's other seats have seen since.

    Attributes:
        GAME: The class of the game.
        SEAT_ACTIONS: The model of actions for several seats at once.
        on_absence: Called if the player has not acted in time, and has lost its seats.
    """

    BLOCKING = False
    GAME: ClassVar[type[MultiAgentEnvironment[Any, Any, Any]]]
    SEAT_ACTIONS: ClassVar[type[SeatActions[Any]]]
    _gathering: ClassVar[dict[str, GameTable]]
    """The tables that wait for players, by name."""

    def __init__(self) -> None:
        self.on_absence: Callable[[], object] = lambda: None
        self._game: MultiAgentEnvironment[Any, Any, Any] | None = None  # of tables for this session alone
        self._lock = asyncio.Lock()  # of calls of that game in threads
        self._table: GameTable | None = None
        self._player = Player((), self._lose_seat)
        self._state = SeatState()

    def reset(
        self,
        *,
        seat: str | list[str] | None = None,
        table: str | None = None,
        policies: Mapping[str, str] | None = None,
        seed: int | None = None,
        episode_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Take seats; return the first observation in which one of them has to act, or an awaitable of it.

        Raises:
            InvalidResetOptionError: There is no such seat or policy, the seat is taken, or the game refuses an option.
            EnvironmentFailureError: The table's other seats were not taken in time.
        """
        if table is not None and not (isinstance(table, str) and 0 < len(table) <= MAX_NAME_CHARS):
            raise InvalidResetOptionError(
                f"expected a name of 1 to {MAX_NAME_CHARS} characters for the table"
            )
        game_options = {name: value for name, value in {"seed": seed, **options}.items() if value is not None}
        seat_policies = self._read_policies(policies)
        state = SeatState(episode_id=str(uuid4()) if episode_id is None else episode_id, table=table)
        if table is not None:
            return self._join(table, seat, seat_policies, game_options, state)
        return self._sit_alone(seat, seat_policies, {**game_options, "episode_id": episode_id}, state)

    def step(self, action: ActT | SeatActions[ActT], /) -> Any:
        """Act for the first of the seats whose turn it is, or for several; return what comes next, or an awaitable.

        Raises:
            EpisodeOverError: No episode is under way, or the session's seats have ended.
            RefusalError: It is not the turn of one of these seats; or the game's `check` raised a ValueError.
            Exception: Whatever else the game's `check` raised; the player may try again.
        """
        table, player = self._table, self._player
        if table is None or not (turn := player.turn):
            begun = table is not None and self._state.episode_id
            raise EpisodeOverError(None if begun else "no episode is under way; call reset() first")
        if type(action) is not self.SEAT_ACTIONS:
            return table.act(player, {turn[0]: action})
        # In the order of turns, whatever that of the client is: the game may go by it.
        actions = {seat: action.seats[seat] for seat in turn if seat in action.seats}
        if len(actions) < len(action.seats):
            other = next(seat for seat in action.seats if seat not in turn)
            text = f"expected actions for seats among {', '.join(turn)}, whose turn it is, got {other!r:.80}"
            raise RefusalError(VALIDATION_ERROR, text)
        return table.act(player, actions)

    @property
    def state(self) -> StateT:
        """The session's seats, and whether one of them has to act."""
        player = self._player
        update = {"turn": list(player.turn), "step_count": player.steps}
        return self._state.model_copy(update=update)  # type: ignore[return-value]

    def get_metadata(self) -> EnvironmentMetadata | Awaitable[EnvironmentMetadata]:
        """Return the game's description."""
        if self.GAME.BLOCKING:
            return start_in_thread(self._lock, lambda: self._own_game().get_metadata())
        return self._own_game().get_metadata()

    def close(self) -> Awaitable[None] | None:
        """Leave the table, and close the game of this session alone after a call that nobody waits for any more."""
        self._leave()
        if self._game is None and not self._lock.locked():
            return None
        if self.GAME.BLOCKING:
            return asyncio.shield(start_in_thread(self._lock, self._close_game))
        closed: Awaitable[None] | None = self._close_game()
        return closed

    def _close_game(self) -> Any:
        return None if self._game is None else self._game.close()

    def _sit_alone(
        self, seat: Any, policies: dict[str, SeatPolicy], options: Mapping[str, Any], state: SeatState
    ) -> Any:
        """Begin an episode at which no other session plays."""
        seats, offered = self.GAME.seats, list(self.GAME.POLICIES.values())
        default = [each for each in seats if each not in policies][: 1 if offered else None]
        own_seats = self._read_seats(seat or default)
        for each in seats:
            if each in own_seats:
                policies.pop(each, None)
            elif each not in policies and not offered:
                text = f'nobody plays the seat {each}; take seat="{ALL}", or name a table that others join'
                raise InvalidResetOptionError(text)
            else:
                policies.setdefault(each, offered[0])
        table = GameTable(self.GAME, policies, options, self._own_game, self._lock)
        player = Player(own_seats, self._lose_seat)
        table.add(player)
        reply = table.begin(player)  # if the game refuses the options, the episode before goes on
        if isinstance(reply, Observation):
            self._sit_down(table, player, state)
            return reply
        return self._sit_down_later(reply, table, player, state)

    def _own_game(self) -> MultiAgentEnvironment[Any, Any, Any]:
        """Return the game of tables for this session alone, which `close` closes."""
        if self._game is None:
            self._game = self.GAME()
        return self._game

    async def _sit_down_later(
        self, reply: Awaitable[Observation], table: GameTable, player: Player, state: SeatState
    ) -> Observation:
        observation = await reply
        self._sit_down(table, player, state)
        return observation

    def _join(
        self, name: str, seat: Any, policies: dict[str, SeatPolicy], options: dict[str, Any], state: SeatState
    ) -> Any:
        """Take seats at a named table; its episode begins with the last of them."""
        gathering = self._gathering
        table = gathering.get(name) or GameTable(self.GAME, policies, options)
        free = table.free_seats
        given = {**options, "policies": policies} if policies else options
        held = {**table.options, "policies": table.policies} if table.policies else table.options
        if table.players and (differing := [name for name in given if given[name] != held.get(name)]):
            raise InvalidResetOptionError(
                f"the table's first session chose other values of {', '.join(differing)}; give the same, or none, or "
                "name another table"
            )
        own_seats = self._read_seats(seat or free[:1])
        if taken := [each for each in own_seats if each not in free]:
            raise InvalidResetOptionError(f"seat {taken[0]} of the table is taken")
        player = Player(own_seats, self._lose_seat)
        self._sit_down(table, player, state)
        table.add(player)
        if len(own_seats) == len(free):
            gathering.pop(name, None)
            return table.begin(player)
        if name not in gathering:
            gathering[name] = table
            loop = asyncio.get_running_loop()
            table.timer = loop.call_later(self.GAME.TURN_TIMEOUT_S, self._end_gathering, name, table)
        return table.wait(player)

    def _sit_down(self, table: GameTable, player: Player, state: SeatState) -> None:
        self._leave()
        self._table, self._player = table, player
        self._state = state.model_copy(update={"seat": list(player.seats)})
        if state.table is None:
            self._state.seed = table.seed
        self.FORKABLE = state.table is None and type(self).FORKABLE

    def _end_gathering(self, name: str, table: GameTable) -> None:
        """End a table that has not got its players in time."""
        if self._gathering.get(name) is table:
            del self._gathering[name]
            free = ", ".join(table.free_seats)
            table.cancel(
                f"nobody took {free} within {self.GAME.TURN_TIMEOUT_S:g} s; call reset to wait again"
            )

    def _lose_seat(self) -> None:
        """Give up the seats of a player that has not acted in time."""
        self._leave()
        self.on_absence()

    def _leave(self) -> None:
        table, self._table = self._table, None
        if table is None:
            return
        self._player.turn = ()
        running = table.leave(self._player)
        if running is not None:
            keep(asyncio.ensure_future(running))
        name = self._state.table
        if name is not None and not table.players and self._gathering.get(name) is table:
            del self._gathering[name]
            assert table.timer is not None
            table.timer.cancel()

    def _read_policies(self, names: Any) -> dict[str, SeatPolicy]:
        """Return policies by seat; InvalidResetOptionError if there is no such seat or policy."""
        offered = self.GAME.POLICIES
        if names is None:
            return {}
        if isinstance(names, Mapping) and all(
            seat in self.GAME.seats and isinstance(name, str) and name in offered
            for seat, name in names.items()
        ):
            return {seat: offered[name] for seat, name in names.items()}
        raise InvalidResetOptionError(
            f"expected the name of a policy ({', '.join(offered) or 'there is none'}) for seats among "
            f"{', '.join(self.GAME.seats)}, got {str(names)[:80]}"
        )

    def _read_seats(self, value: Any) -> tuple[str, ...]:
        seats = self.GAME.seats
        if value == ALL:
            return tuple(seats)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or any(name not in seats for name in names):
            raise InvalidResetOptionError(
                f'expected the option seat to be "{ALL}", or one or several of {", ".join(seats)}, got {value!r:.80}'
            )
        return tuple(seat for seat in seats if seat in names)


def seat_environment(
    game: type[MultiAgentEnvironment[Any, Any, Any]],
) -> type[SeatEnvironment[Any, Any, Any]]:
    """Return the class whose instances are the sessions of a game; sessions of one such class meet at its tables.

    Raises:
        ConfigurationError: The class does not name its models or seats.
    """
    models = models_of(game)
    action, observation = models.action, models.observation
    if action is None or observation is None or not game.seats:
        raise ConfigurationError(
            f"the models or seats of {game.__qualname__} are unknown; name them, as in "
            "class Kuhn(MultiAgentEnvironment[Bet, Hand]): seats = (...)"
        )
    seat: Any = Literal[tuple(game.seats)]
    build: Any = create_model
    seat_actions: Any = SeatActions
    state = build(
        f"{game.__name__}SeatState", __base__=SeatState, seat=(list[seat], Field(default_factory=list))
    )
    base: Any = SeatEnvironment

    @wraps(SeatEnvironment.reset)
    def reset(self: Any, **options: Any) -> Any:
        return SeatEnvironment.reset(self, **options)

    one: Any = Literal[(*game.seats, ALL)]  # a list of seats is for programs; a form offers these
    reset.__annotations__ = {**SeatEnvironment.reset.__annotations__, "seat": one | None}
    members: dict[str, Any] = {
        "GAME": game,
        "SEAT_ACTIONS": seat_actions[action],
        "reset": reset,
        "__doc__": game.__doc__,
        "__module__": game.__module__,
        "FORKABLE": game.FORKABLE and game.snapshot is Environment.snapshot,  # it is copied with its table
        "SUPPORTS_CONCURRENT_SESSIONS": game.SUPPORTS_CONCURRENT_SESSIONS,
        "_gathering": {},
    }
    return new_class(
        game.__name__, (base[action, observation, state],), exec_body=lambda body: body.update(members)
    )
