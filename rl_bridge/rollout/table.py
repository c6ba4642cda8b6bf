"""Self-play: a session that has several seats of a game, as a session for each seat, so that each is an episode."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from openenv_core import Observation, StepResult
from rl_bridge.errors import EpisodeUnscoredError, RolloutError
from rl_bridge.rollout.episode import require_scored

SEAT: Final = "seat"
"""The option of a reset with the seats to take, and the key of a reply's metadata with the seat that it is for."""
TURN: Final = "turn"
"""The key of a reply's metadata with the session's seats that have to act."""
OTHERS: Final = "others"
"""The key of a reply's metadata with what the session's other seats have seen since, by seat (docs/players.md)."""


class TableSession(Protocol):
    """A session of a game, which acts for one of its seats at a time."""

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode."""

    async def step_seats(self, actions: Mapping[str, Any], /) -> StepResult[Any]:
        """Act for seats of the session."""


class Table:
    """One table of a game, at which one session has several seats.

    `seat` gives each seat a session of its own: its reset and its steps return when it is that seat's turn, or its end.
    Seats that act at once have their turns at once. All seats must be played at once.

    Args:
        session: The session that has the seats.
        seats: Their names.
        observation_type: The type of the game's observations.
    """

    def __init__(
        self, session: TableSession, seats: Sequence[str], observation_type: type[Observation]
    ) -> None:
        self._session = session
        self._observation_type = observation_type
        self._rewards = dict.fromkeys(seats, 0.0)  # since the seat's last reply
        self._totals = dict.fromkeys(seats, 0.0)
        self._replies = {seat: _new_reply() for seat in seats}
        self._ended: set[str] = set()
        self._acting: set[str] = set()  # seats that have been told that it is their turn
        self._lock = asyncio.Lock()  # of the session's steps
        self._begun = self._was_left = False

    def earned_by_others(self, seat: str) -> float | None:
        """Return what the session's other seats have earned together, once all have ended.

        None if it has no other, or if a seat was left before the game was over.
        """
        if self._was_left:
            return None
        others = [total for other, total in self._totals.items() if other != seat]
        return sum(others) if others else None

    def seat(self, name: str) -> "SeatSession":
        """Return a session of one seat, for one episode."""
        return SeatSession(self, name)

    async def begin(self, **options: Any) -> None:
        """Reset the session with these options, unless another seat has.

        Raises:
            RolloutError: The environment has no such seats.
            Exception: As the session's `reset`, and `require_scored`.
        """
        if not self._begun:
            self._begun = True
            self._deliver(await self._session.reset(**{**options, SEAT: list(self._replies)}))

    async def wait(self, seat: str) -> StepResult[Any]:
        """Return a seat's next reply; EpisodeUnscoredError if another seat was left before."""
        reply = await self._replies[seat]
        self._replies[seat] = _new_reply()
        return reply

    async def act(self, seat: str, action: Any) -> None:
        """Act for a seat whose turn it is; raises as the session's `step`, and `require_scored`."""
        async with self._lock:
            result = await self._session.step_seats({seat: action})
            self._acting.discard(seat)
            self._deliver(result)

    def leave(self, seat: str) -> None:
        """End a seat's play. If the game is not over for it, the others' game has no result."""
        if seat in self._ended:
            return
        self._ended.add(seat)
        self._was_left = True
        for other in self._replies.keys() - self._ended:
            self._ended.add(other)
            if not (reply := self._replies[other]).done():
                reply.set_exception(
                    EpisodeUnscoredError(f"the seat {seat} was left before the game was over")
                )
                reply.exception()  # whoever plays it may be gone, or wait for its turn no more

    def _deliver(self, result: StepResult[Any]) -> None:
        """Give each seat that acts next, or has ended, its part of a reply."""
        metadata = result.metadata or {}
        others: Mapping[str, Any] = metadata.get(OTHERS, {})
        lone = next(iter(self._replies)) if len(self._replies) == 1 else None  # is told no seat
        if (seat := metadata.get(SEAT, lone)) not in self._replies:
            raise RolloutError(
                f"expected replies for the seats {', '.join(self._replies)} (env.seats), got one for {seat!r}; "
                "is the environment a game of several seats?"
            )
        turn = set(metadata.get(TURN, ())) - self._acting
        other_results = {
            other: self._make_result(seen)
            for other, seen in others.items()
            if seen["terminated"] or seen["truncated"] or other in turn
        }
        for each in (result, *other_results.values()):
            require_scored(each)
        for each, reward in (
            (seat, result.reward),
            *((other, seen["reward"]) for other, seen in others.items()),
        ):
            self._rewards[each] += reward or 0.0
            self._totals[each] += reward or 0.0
        for each, its_result in (*other_results.items(), (seat, result)):
            self._reply(each, its_result)

    def _make_result(self, seen: Mapping[str, Any]) -> StepResult[Any]:
        """Return what another of the session's seats has seen."""
        done = seen["terminated"] or seen["truncated"]
        ends = {"done": done, "terminated": seen["terminated"], "truncated": seen["truncated"]}
        observation = self._observation_type.model_validate({**seen["observation"], **ends})
        return StepResult(observation, done=done)

    def _reply(self, seat: str, result: StepResult[Any]) -> None:
        if seat in self._ended or seat in self._acting:
            return
        if result.done:
            self._ended.add(seat)
        else:
            self._acting.add(seat)
        reward, self._rewards[seat] = self._rewards[seat], 0.0
        self._replies[seat].set_result(replace(result, reward=reward))


class SeatSession:
    """A session with one of a table's seats."""

    def __init__(self, table: Table, seat: str) -> None:
        self._table = table
        self._seat = seat

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Return what the seat sees when it acts first; all seats have the same options. Raises as `Table.begin`."""
        await self._table.begin(**options)
        return await self._table.wait(self._seat)

    async def step(self, action: Any, /) -> StepResult[Any]:
        """Act; returns when it is the seat's turn again, or its end. Raises as `Table.act` and `Table.wait`."""
        await self._table.act(self._seat, action)
        return await self._table.wait(self._seat)


def _new_reply() -> "asyncio.Future[StepResult[Any]]":
    return asyncio.get_running_loop().create_future()
