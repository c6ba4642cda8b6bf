"""Games that block, hang, raise or forget something, at tables without a server."""

import asyncio
import inspect
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from games import BlockingRounds, Forfeited, Guess, Rounds, Secret, Turns

from openenv_core.errors import EnvironmentFailureError
from servers.seats import SeatEnvironment, seat_environment

TIMEOUT_S = 60.0


async def call(result: Any) -> Any:
    return await asyncio.wait_for(result, TIMEOUT_S) if inspect.isawaitable(result) else result


async def gather(results: list[Any]) -> list[Any]:
    return await asyncio.gather(*(call(result) for result in results), return_exceptions=True)


def make_players(game: Any) -> "list[SeatEnvironment[Any, Any, Any]]":
    cls = seat_environment(game)
    return [cls() for _ in "abc"]


async def sit(players: "list[SeatEnvironment[Any, Any, Any]]") -> None:
    await gather([player.reset(table="t", seat=seat) for player, seat in zip(players, "abc", strict=True)])


async def step(players: "list[SeatEnvironment[Any, Any, Any]]") -> list[Any]:
    async def act(player: "SeatEnvironment[Any, Any, Any]") -> Any:
        return await call(player.step(Guess(number=1)))

    return await gather([act(player) for player in players])


@pytest.mark.parametrize("base", [Rounds, BlockingRounds])
async def test_players_see_the_end_of_a_game_that_cannot_be_closed(base: Any) -> None:
    class Unclosable(base):  # type: ignore[misc]  # any game
        def close(self) -> None:
            raise SystemExit(f"a bug with {self.state.secrets}")

    await sit(players := make_players(Unclosable))
    for _ in range(3):
        seen = await step(players)
    assert [each.done for each in seen] == [True] * 3


async def test_a_forfeit_ends_the_episode_though_its_observations_do_not_say_so() -> None:
    class Unmarked(Forfeited):
        def forfeit(self, seat: str) -> dict[str, Secret]:
            return {each: Secret(secret=each, reward=5) for each in self.seats}

    players = make_players(Unmarked)
    waiting = [player.reset(table="t", seat=seat) for player, seat in zip(players, "abc", strict=True)]
    await call(waiting[0])
    players[0].close()
    for seen in await gather(waiting[1:]):
        assert (seen.terminated, seen.truncated, seen.reward) == (True, False, 5)


@pytest.mark.parametrize("base", [Rounds, BlockingRounds])
@pytest.mark.parametrize("bug", [lambda: next(iter(())), lambda: sys.exit(3)])
async def test_what_a_game_raises_ends_neither_the_server_nor_a_wait_for_ever(base: Any, bug: Any) -> None:
    class Failing(base):  # type: ignore[misc]  # any game
        def step(self, actions: Mapping[str, Guess]) -> Any:
            return bug()

    await sit(players := make_players(Failing))
    errors = await step(players)
    assert [type(error) for error in errors] == [EnvironmentFailureError] * 3
    if base is Rounds:
        return  # on the event loop a session takes whatever a method raises
    (alone, *_) = make_players(Failing)
    await call(alone.reset(seat="all"))
    for _ in "ab":
        await call(alone.step(Guess(number=1)))
    with pytest.raises(RuntimeError, match=r"StopIteration|SystemExit: 3"):
        await call(alone.step(Guess(number=1)))


async def test_a_table_can_be_forked_after_its_player_has_waited() -> None:
    class Long(Turns):
        @property
        def turn(self) -> tuple[str]:
            return ("a",) if self.round in (0, 500) else ("b",)

    (player, *_) = make_players(Long)
    await call(player.reset(rounds=600))
    waiting = player.step(Guess(number=1))
    assert isinstance(waiting, asyncio.Future)
    assert (await call(waiting)).round == 500
    (other, *_) = make_players(Long)
    other.restore(player.snapshot())
    assert [(await call(each.step(Guess(number=1)))).round for each in (player, other)] == [600, 600]


async def test_a_game_that_blocks_is_made_and_closed_in_threads_and_not_during_a_step() -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    calls: list[tuple[str, bool]] = []

    class Slow(BlockingRounds):
        def __init__(self) -> None:
            calls.append(("made", threading.current_thread() is threading.main_thread()))

        def step(self, actions: Mapping[str, Guess]) -> Any:
            begun.set()
            assert may_go_on.wait(TIMEOUT_S)
            calls.append(("step", threading.current_thread() is threading.main_thread()))
            return super().step(actions)

        def close(self) -> None:
            calls.append(("close", threading.current_thread() is threading.main_thread()))

    (player, *_) = make_players(Slow)
    assert (await call(player.get_metadata())).name == "Slow"
    await call(player.reset(seat="all"))
    for _ in "ab":
        await call(player.step(Guess(number=1)))
    left = asyncio.create_task(player.step(Guess(number=1)))
    assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
    left.cancel()
    closing = player.close()
    may_go_on.set()
    await call(closing)
    assert calls == [("made", False), ("step", False), ("close", False)]


async def test_games_that_hang_delay_no_other() -> None:
    may_go_on = threading.Event()

    class Hanging(BlockingRounds):
        def reset(self, *, hang: bool = True) -> dict[str, Secret]:
            if hang:
                assert may_go_on.wait(TIMEOUT_S)
            return super().reset()

    cls = seat_environment(Hanging)
    hanging = [asyncio.create_task(cls().reset(seat="all")) for _ in range(40)]
    try:
        assert (await call(cls().reset(seat="all", hang=False))).round == 0
        assert not any(task.done() for task in hanging)
    finally:
        may_go_on.set()
    await gather(hanging)


async def test_what_an_author_may_get_wrong_is_named() -> None:
    class Nothing(Turns):
        def step(self, actions: Mapping[str, Guess]) -> Any:
            return None

    class NotBySeat(Turns):
        def step(self, actions: Mapping[str, Guess]) -> Any:
            return Secret(secret="x")

    class NobodyWeKnow(Turns):
        turn = "bank"

    (player, *_) = make_players(NobodyWeKnow)
    with pytest.raises(
        EnvironmentFailureError, match=r"turn is a sequence of seats, such as \('a',\), not 'bank'"
    ):
        await call(player.reset())
    for game, match in ((Nothing, "NoneType"), (NotBySeat, "Secret")):
        (player, *_) = make_players(game)
        await call(player.reset())
        with pytest.raises(EnvironmentFailureError, match=f"returned {match}, not the observations by seat"):
            await call(player.step(Guess(number=1)))
