"""Tables with players that send anything, leave, stall, and lose their connections."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias

import pytest
from faulty_proxy import faulty_proxy
from games import BlockingRounds, Guess, Hasty, Rounds, Secret, Turns
from serving import eventually, serving, socket_to
from websockets.exceptions import ConnectionClosed, InvalidMessage
from websockets.typing import Subprotocol

from envs.kuhn_env.server.environment import KuhnEnvironment
from envs.negotiation_env.server.environment import NegotiationEnvironment
from openenv_core import GenericEnvClient
from servers import create_app

SECRET = re.compile(r"secret-[a-z]+-[0-9a-f]+")
IMPATIENCE_S = 0.02
Move: TypeAlias = Callable[[Random], dict[str, Any]]


class HastyRounds(Rounds):
    """A short time to act, so that games with players that only wait end."""

    TURN_TIMEOUT_S = 0.1


class HastyBlockingRounds(BlockingRounds):
    """The same in threads."""

    TURN_TIMEOUT_S = 0.1


def marked(game: Any) -> Any:
    """Return a game each of whose observations bears a text of its seat, of this episode alone."""

    class Marked(game):  # type: ignore[misc]  # any game
        TURN_TIMEOUT_S = 0.1

        def reset(self) -> Any:
            self.marks = {seat: f"secret-{seat}-{self.rng.getrandbits(64):x}" for seat in self.seats}
            return self.mark(super().reset())

        def step(self, actions: Any) -> Any:
            return self.mark(super().step(actions))

        def forfeit(self, seat: str) -> Any:
            return self.mark(super().forfeit(seat))

        def mark(self, seen: Any) -> Any:
            for seat, observation in seen.items():
                observation.metadata["mark"] = self.marks[seat]
            return seen

    return Marked


def guess(rng: Random) -> dict[str, Any]:
    return {"number": rng.randrange(10)}


def bet(rng: Random) -> dict[str, Any]:
    return {"action": rng.choice(["bet", "pass"])}


def talk(rng: Random) -> dict[str, Any]:
    return rng.choice(
        [{"message": "hm"}, {"message": "", "take": {"books": 1}}, {"message": "", "accept": True}]
    )


GAMES = {
    "rounds": (HastyRounds, guess),
    "turns": (Hasty, guess),
    "threads": (HastyBlockingRounds, guess),
    "kuhn": (marked(KuhnEnvironment), bet),
    "negotiation": (marked(NegotiationEnvironment), talk),
}


def draw_frame(rng: Random, table: str, draw_move: Move) -> dict[str, Any] | str:
    """Return a request as a player may send it, most often a legal move."""
    seats: Any = rng.choice(["a", "b", "c", "first", None, "all", ["a", "b"], ["c", "c"], "d", 7, {"a": 1}])
    options: dict[str, Any] = {"table": table} if rng.random() < 0.8 else {}
    if rng.random() < 0.5:
        options["seat"] = seats
    return rng.choices(
        [
            {"type": "step", "data": draw_move(rng)},
            {"type": "step", "data": {"seats": {seat: draw_move(rng) for seat in rng.choices("abcd", k=2)}}},
            {"type": "step", "data": {"seats": rng.choice([{}, {"first": draw_move(rng)}, {"a": 1}, ["a"]])}},
            {"type": "step", "data": {"number": rng.choice([-1, 99])}},
            {"type": "step", "data": {"number": "secret", "seat": "b"}},
            {"type": "state"},
            {"type": "reset", "data": options},
            {"type": "reset", "data": {**options, "policies": {"a": rng.choice(["guess", "no"])}}},
            '{"type": "step", "data": {"number": ',
        ],
        [8, 2, 1, 1, 1, 2, 2, 1, 1],
    )[0]


class HostileGames:
    """Games of hostile players.

    Attributes:
        seen_by: The players that have seen a secret.
        stalls: Players that were asked to act, did nothing, and were found without a session.
    """

    def __init__(self, game: Any, draw_move: Move) -> None:
        self.game = game
        self.seen_by: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.stalls = 0
        self._draw_move = draw_move

    async def play(self, count: int, seed: int) -> None:
        app = create_app(self.game, max_concurrent_envs=256)
        together = asyncio.Semaphore(24)

        async def play(game: int) -> None:
            async with together:
                everyone = (
                    self._play_one(address, f"table {game}", Random(f"{seed} {game} {player}"))
                    for player in range(len(self.game.seats))
                )
                for player, frames in enumerate(await asyncio.gather(*everyone)):
                    for secret in SECRET.findall(" ".join(frames)):
                        self.seen_by[secret].add((game, player))

        async with serving(app) as address:
            await asyncio.gather(*map(play, range(count)))
            await eventually(lambda: app.sessions.active == 0)
        assert app.served.factory._gathering == {}  # type: ignore[attr-defined]
        assert {secret: players for secret, players in self.seen_by.items() if len(players) > 1} == {}

    async def _play_one(self, address: str, table: str, rng: Random) -> list[str]:
        """Play a game from one connection; return every frame that came."""
        v1, number, received = rng.random() < 0.5, 0, []
        protocols = {"subprotocols": [Subprotocol("ropewalk.v1")]} if v1 else {}
        # A busy machine may not read a request's headers within the server's time for them.
        with suppress(ConnectionClosed, InvalidMessage):
            async with socket_to(address, **protocols) as connection:
                if v1:
                    await connection.send(json.dumps({"id": 0, "op": "open", "count": 1}))
                    received.append(str(await connection.recv()))
                frame: Any = {"type": "reset", "data": {"table": table}}
                is_staller = rng.random() < 0.1 and self.game.TURN_TIMEOUT_S < 1
                for _ in range(1 if is_staller else rng.randrange(1, 9)):
                    number += 1
                    if isinstance(frame, dict):
                        frame = json.dumps({"id": number, **frame} if v1 else frame)
                    await connection.send(frame)
                    with suppress(TimeoutError):
                        patience_s = None if is_staller else IMPATIENCE_S
                        received.append(str(await asyncio.wait_for(connection.recv(), patience_s)))
                    frame = draw_frame(rng, table, self._draw_move)
                if is_staller and '"done":false' in received[-1]:
                    await self._stall(connection, v1, received)
                if rng.random() < 0.3:
                    connection.transport.abort()
        return received

    async def _stall(self, connection: Any, v1: bool, received: list[str]) -> None:
        """Do nothing until the time to act is over: then there is no session, so no slot."""
        await asyncio.sleep(5 * self.game.TURN_TIMEOUT_S)  # timers of one event loop run in order
        self.stalls += 1
        with suppress(ConnectionClosed):
            await connection.send(json.dumps({**({"id": 9} if v1 else {}), "type": "state"}))
            received.append(str(await connection.recv()))
            assert '"type":"error"' in received[-1], received[-1]


def assert_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Assert that no log line has a secret; the traceback of a game's own error is for the operator."""
    assert not [each for each in caplog.messages if SECRET.search(each)]


@pytest.mark.parametrize("name", GAMES)
async def test_no_player_is_sent_what_another_seat_sees(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "servers")
    games = HostileGames(*GAMES[name])
    await games.play(40, 0)
    assert len(games.seen_by) > 10
    assert_silent(caplog)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", GAMES)
async def test_no_player_is_sent_what_another_seat_sees_in_thousands_of_games(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """10,000 games, of all kinds together."""
    caplog.set_level("INFO", "servers")
    games = HostileGames(*GAMES[name])
    await games.play(10_000 // len(GAMES), 1)
    assert len(games.seen_by) > 1000
    assert games.stalls > 10 or name == "turns"
    assert_silent(caplog)


class Recorded(Turns):
    """Keeps every move of every episode."""

    moves: list[tuple[str, int]] = []  # noqa: RUF012 - of all instances

    def step(self, actions: Mapping[str, Guess]) -> dict[str, Secret]:
        self.moves += [(seat, action.number) for seat, action in actions.items()]
        return super().step(actions)


@pytest.mark.parametrize("games", [6, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
async def test_connections_that_break_anywhere_repeat_no_move_and_lose_none(games: int) -> None:
    rng, everybody = Random(5), asyncio.Barrier(3)
    Recorded.moves.clear()
    async with serving(create_app(Recorded)) as address, faulty_proxy(address) as proxy:

        async def cut_during(request: Any) -> Any:
            task = asyncio.create_task(request)
            for _ in range(rng.randrange(6)):  # before it is sent, or somewhere on its way
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                proxy.cut()
            return await task

        async def play(seat: str) -> list[tuple[int, Any]]:
            results = []
            async with GenericEnvClient(proxy.url) as client:
                await (
                    client.reset()
                )  # a session that its client has never heard of keeps its seat until its deadline
                await everybody.wait()
                for game in range(games):
                    await cut_during(client.reset(table=f"table {game}", seat=seat))
                    number = 10 * (game % 9) + "abc".index(seat)  # above 90 the game fails
                    results.append((number, await cut_during(client.step({"number": number}))))
            return results

        async with asyncio.TaskGroup() as group:  # whose failure ends the others
            tasks = [group.create_task(play(seat)) for seat in "abc"]
        played = [task.result() for task in tasks]
    assert proxy.connections > 3
    assert all(result.reward == number for results in played for number, result in results)
    assert Recorded.moves == [
        (seat, results[game][0]) for game in range(games) for seat, results in zip("abc", played, strict=True)
    ]
