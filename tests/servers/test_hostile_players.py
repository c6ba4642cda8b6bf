"""Tables with players that send anything, leave, stall, and lose their connections."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from faulty_proxy import faulty_proxy
from games import Guess, Hasty, Rounds, Secret, Turns
from serving import eventually, serving, socket_to
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from openenv_core import GenericEnvClient
from servers import create_app
from servers.app import EnvironmentApp

SECRET = re.compile(r"secret-[abc]-[0-9a-f]+")
IMPATIENCE_S = 0.02


class HastyRounds(Rounds):
    """A short time to act, so that games with players that only wait end."""

    TURN_TIMEOUT_S = 0.1


def draw_frame(rng: Random, table: str) -> dict[str, Any] | str:
    """Return a request as a player may send it, most often a legal move."""
    seats: Any = rng.choice(["a", "b", "c", None, "all", ["a", "b"], ["c", "c"], "d", 7, {"a": 1}])
    options: dict[str, Any] = {"table": table} if rng.random() < 0.8 else {}
    if rng.random() < 0.5:
        options["seat"] = seats
    return rng.choices(
        [
            {"type": "step", "data": {"number": rng.randrange(10)}},
            {"type": "step", "data": {"number": rng.choice([-1, 99])}},
            {"type": "step", "data": {"number": "secret", "seat": "b"}},
            {"type": "state"},
            {"type": "reset", "data": options},
            {"type": "reset", "data": {**options, "policies": {"a": rng.choice(["guess", "no"])}}},
            '{"type": "step", "data": {"number": ',
        ],
        [8, 1, 1, 2, 2, 1, 1],
    )[0]


async def play_hostile(address: str, table: str, rng: Random) -> list[str]:
    """Play a game from one connection; return every frame that came."""
    v1, number, received = rng.random() < 0.5, 0, []
    protocols = {"subprotocols": [Subprotocol("ropewalk.v1")]} if v1 else {}
    with suppress(ConnectionClosed):
        async with socket_to(address, **protocols) as connection:
            if v1:
                await connection.send(json.dumps({"id": 0, "op": "open", "count": 1}))
                received.append(str(await connection.recv()))
            frame: Any = {"type": "reset", "data": {"table": table}}
            for _ in range(rng.randrange(1, 9)):
                number += 1
                if isinstance(frame, dict):
                    frame = json.dumps({"id": number, **frame} if v1 else frame)
                await connection.send(frame)
                with suppress(TimeoutError):
                    received.append(str(await asyncio.wait_for(connection.recv(), IMPATIENCE_S)))
                frame = draw_frame(rng, table)
            if rng.random() < 0.3:
                connection.transport.abort()
    return received


async def play_games(app: EnvironmentApp, count: int, seed: int) -> int:
    """Play games of three hostile players; return how many secrets a player has seen."""
    seen_by: dict[str, set[tuple[int, int]]] = defaultdict(set)
    together = asyncio.Semaphore(8)

    async def play(game: int) -> None:
        async with together:
            everyone = (
                play_hostile(address, f"table {game}", Random(f"{seed} {game} {player}"))
                for player in range(3)
            )
            for player, frames in enumerate(await asyncio.gather(*everyone)):
                for secret in SECRET.findall(" ".join(frames)):
                    seen_by[secret].add((game, player))

    async with serving(app) as address:
        await asyncio.gather(*map(play, range(count)))
        await eventually(lambda: app.sessions.active == 0)
    assert app.served.factory._gathering == {}  # type: ignore[attr-defined]
    assert {secret: players for secret, players in seen_by.items() if len(players) > 1} == {}
    return len(seen_by)


@pytest.mark.parametrize("game", [HastyRounds, Hasty])
async def test_no_player_is_sent_what_another_seat_sees(game: Any) -> None:
    assert await play_games(create_app(game), 60, 0) > 10


@pytest.mark.soak
@pytest.mark.parametrize("game", [HastyRounds, Hasty])
async def test_no_player_is_sent_what_another_seat_sees_in_thousands_of_games(game: Any) -> None:
    assert await play_games(create_app(game), 5000, 1) > 5000


class Recorded(Turns):
    """Keeps every move of every episode."""

    moves: list[tuple[str, int]] = []  # noqa: RUF012 - of all instances

    def step(self, actions: Mapping[str, Guess]) -> dict[str, Secret]:
        self.moves += [(seat, action.number) for seat, action in actions.items()]
        return super().step(actions)


async def test_connections_that_break_anywhere_repeat_no_move_and_lose_none() -> None:
    rng, games, everybody = Random(5), 6, asyncio.Barrier(3)
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
                    number = 10 * game + "abc".index(seat)
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
