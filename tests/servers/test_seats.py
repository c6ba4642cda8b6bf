"""Games of several seats: sessions that meet at a table, sessions with several seats, and players that are gone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import new_class
from typing import Any

import pytest
from counter import Add, Count
from games import BlockingRounds, Forfeited, Guess, Hasty, Rounds, Turns, secret_of
from serving import eventually, serving

from envs.kuhn_env.server.app import app as kuhn
from openenv_core import Action, GenericEnvClient, MultiAgentEnvironment, Observation
from openenv_core.errors import (
    ConfigurationError,
    EpisodeOverError,
    ExecutionError,
    ServerError,
    SessionError,
    ValidationFailedError,
)
from servers import create_app
from servers.app import EnvironmentApp

SEATS = ("a", "b", "c")


@asynccontextmanager
async def players(game: Any, count: int) -> AsyncIterator[tuple[EnvironmentApp, list[GenericEnvClient]]]:
    app = game if isinstance(game, EnvironmentApp) else create_app(game)
    async with serving(app) as address, AsyncExitStack() as stack:
        yield (
            app,
            [await stack.enter_async_context(GenericEnvClient(f"http://{address}")) for _ in range(count)],
        )


def sit(clients: list[GenericEnvClient], **options: Any) -> "list[asyncio.Task[Any]]":
    """Seat the clients in order; return their resets, which wait for their turns."""
    return [
        asyncio.create_task(client.reset(table="t", seat=seat, **options))
        for client, seat in zip(clients, SEATS, strict=False)
    ]


def say(client: GenericEnvClient, number: int) -> "asyncio.Task[Any]":
    return asyncio.create_task(client.step({"number": number}))


async def test_a_seat_is_told_when_its_turn_comes() -> None:
    async with players(Turns, 3) as (_, clients):
        turns = sit(clients, seed=5)
        assert len({secret_of(await turns[0])}) == 1
        for index in (0, 1, 2):
            assert not turns[(index + 1) % 3].done()
            assert (await clients[index].state())["turn"] == [SEATS[index]]
            turns[index] = say(clients[index], index)
            if index < 2:
                assert (await turns[index + 1]).observation["round"] == index + 1
        results = await asyncio.gather(*turns)
        assert [result.reward for result in results] == [0, 1, 2]
        assert all(result.terminated for result in results)
        assert len({secret_of(result) for result in results}) == 3
        with pytest.raises(ExecutionError, match="call reset"):
            await clients[1].step({"number": 1})


@pytest.mark.parametrize("game", [Rounds, BlockingRounds])
async def test_seats_that_act_at_once_wait_for_each_other(game: Any) -> None:
    async with players(game, 3) as (_, clients):
        for _ in range(2):  # a table's name can be used again
            begun = await asyncio.gather(*sit(clients))
            assert not any(result.done for result in begun)
            for number in (1, 2, 3):
                waiting = [say(clients[0], number), say(clients[2], 10 * number)]
                with pytest.raises(ValidationFailedError, match="b said -1"):
                    await say(clients[1], -1)
                assert not any(step.done() for step in waiting)
                results = [await say(clients[1], 5), *await asyncio.gather(*waiting)]
                assert [result.reward for result in results] == [5, number, 10 * number]
                assert [result.done for result in results] == [number == 3] * 3


async def test_a_released_client_plays_one_seat_against_the_servers_policies() -> None:
    async with players(Turns, 1) as (_, (client,)):
        result = await client.reset(seed=4)
        assert (result.observation["round"], result.metadata) == (0, None)
        state = await client.state()
        assert (state["seat"], state["seed"], state["table"]) == (["a"], 4, None)
        assert "secrets" not in state
        assert (await client.step({"number": 3})).done
        again = [await client.reset(seed=4, seat="c") for _ in range(2)]
        assert secret_of(again[0]) == secret_of(again[1]) != secret_of(result)
        named = await client.reset(seat="b", policies={"a": "seven"})
        assert named.observation["round"] == 1


async def test_a_session_may_hold_all_seats_and_be_forked() -> None:
    async with players(Rounds, 1) as (_, (client,)):
        seen = [await client.reset(seed=1)]  # no policy of the server's would play the others
        while not seen[-1].done:
            seen.append(await client.step({"number": len(seen)}))
            if len(seen) == 5:
                assert (await client.state())["turn"] == ["b", "c"]
        assert [result.metadata["seat"] for result in seen if result.metadata] == [*"abc" * 3, "a"]
        assert len({secret_of(result) for result in seen}) == 3
        rewards = dict.fromkeys(SEATS, 0)
        for result in seen:
            assert result.metadata is not None
            rewards[result.metadata["seat"]] += result.reward or 0
            for seat, other in result.metadata["others"].items():
                rewards[seat] += other["reward"] or 0
        assert rewards == {"a": 1 + 4 + 7, "b": 2 + 5 + 8, "c": 3 + 6 + 9}


@pytest.mark.parametrize("game", [Rounds, BlockingRounds])
async def test_a_session_may_act_for_several_seats_at_once(game: Any) -> None:
    async with players(game, 2) as (_, (client, other)):
        begun = [
            asyncio.create_task(client.reset(table="t", seat=["a", "c"], seed=1)),
            asyncio.create_task(other.reset(table="t", seat="b")),
        ]
        result, _ = await asyncio.gather(*begun)
        assert result.metadata is not None
        assert (result.metadata["seat"], result.metadata["turn"]) == ("a", ["a", "c"])
        for round_number in (1, 2, 3):
            with pytest.raises(ValidationFailedError, match="c said -1"):
                await client.step_seats({"a": {"number": 4}, "c": {"number": -1}})
            with pytest.raises(ValidationFailedError, match="seats among a, c, whose turn it is, got 'b'"):
                await client.step_seats({"a": {"number": 4}, "b": {"number": 4}})
            assert (await client.state())["turn"] == ["a", "c"]
            acting = asyncio.create_task(client.step_seats({"a": {"number": 4}, "c": {"number": 6}}))
            await say(other, 5)
            result = await acting
            assert (result.observation["round"], result.reward) == (round_number, 4)
            assert result.metadata is not None
            assert result.metadata["others"]["c"]["reward"] == 6
        assert result.done
        assert (await client.state())["step_count"] == 3


async def test_actions_by_seat_are_validated_like_others() -> None:
    async with players(Rounds, 1) as (_, (client,)):
        await client.reset(seat="all")
        for actions, location in (
            ({"a": {"number": "x"}}, ["seats", "a", "number"]),
            ({}, ["seats"]),
            ({"a": {"number": 1, "more": 2}}, ["seats", "a", "more"]),
        ):
            with pytest.raises(ValidationFailedError) as caught:
                await client.step_seats(actions)
            assert [error["loc"] for error in caught.value.data["errors"]] == [location]
        with pytest.raises(ValidationFailedError) as caught:
            await client.step({"number": "x"})
        assert [error["loc"] for error in caught.value.data["errors"]] == [["number"]]
        assert (await client.step_seats({"b": {"number": 2}})).metadata["turn"] == ["a", "c"]  # type: ignore[index]
        result = await client.step_seats({"c": {"number": 3}, "a": {"number": 1}})
        assert (result.observation["round"], result.reward) == (1, 1)


class Tickets(Action):
    seats: int


class Theatre(MultiAgentEnvironment[Tickets, Observation]):
    """Its action has a field of the name by which a step acts for several seats."""

    seats = ("a", "b")
    BLOCKING = False

    def reset(self) -> dict[str, Observation]:
        return {seat: Observation() for seat in self.seats}

    def step(self, actions: Mapping[str, Tickets]) -> dict[str, Observation]:
        assert list(actions) == ["a", "b"]
        return {seat: Observation(reward=actions[seat].seats) for seat in self.seats}


async def test_an_action_may_have_a_field_named_seats_and_seats_act_in_order() -> None:
    async with players(Theatre, 1) as (_, (client,)):
        await client.reset(seat="all")
        await client.step({"seats": 3})
        assert (await client.step_seats({"b": {"seats": 4}})).reward == 3
        assert (await client.step_seats({"b": {"seats": 4}, "a": {"seats": 5}})).reward == 5


async def test_a_batch_may_act_for_one_seat_of_some_tables_and_several_of_others() -> None:
    async with players(Rounds, 1) as (_, (client,)):
        vector = await client.vector(3)
        try:
            await vector.ask("reset", options={"seat": "all"})
            every_seat = {"seats": {seat: {"number": 1} for seat in SEATS}}
            (reply,) = await vector.ask("step", actions=[every_seat, {"number": 1}, every_seat])
            assert [row["round"] for row in reply.fields["rows"]] == [1, 0, 1]
            (reply,) = await vector.ask("step", actions=[every_seat] * 3)
            assert [row["round"] for row in reply.fields["rows"]] == [2, 2]
            assert "seats among b, c" in reply.fields["errors"]["1"]["message"]
        finally:
            await vector.close()


async def test_a_table_of_one_session_can_be_forked() -> None:
    async with players(Rounds, 1) as (_, (client,)):
        vector = await client.vector(1)
        try:
            await vector.ask("reset", seeds=[1])
            await vector.ask("step", actions=[{"number": 1}])
            await vector.ask("fork", member=0, count=1)
            for number in (2, 3):
                (reply,) = await vector.ask("step", actions=[{"number": number}] * 2)
                assert reply.fields["rows"][0] == reply.fields["rows"][1]
            assert reply.fields["rows"][0]["metadata"]["others"]["c"]["reward"] == 3
        finally:
            await vector.close()


@pytest.mark.parametrize(
    ("game", "last"),
    [(Rounds, (None, False, True)), (Forfeited, (6, True, False)), (Turns, (1, True, False))],
)
async def test_a_player_that_leaves_is_replaced_as_the_class_declares(game: Any, last: Any) -> None:
    async with players(game, 3) as (app, clients):
        turns = sit(clients)
        await turns[0]
        turns[0] = say(clients[0], 1)
        await turns[1]
        await clients[2].close()
        await eventually(lambda: app.sessions.active == 2)
        if game is Turns:
            assert (await say(clients[1], 8)).reward == 8
        result = await turns[0]
        assert (result.reward, result.terminated, result.truncated) == last
        assert (await asyncio.gather(turns[2], return_exceptions=True))[0] is not None


async def test_a_player_that_leaves_while_a_slow_game_begins_is_missed_by_nobody() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class SlowRounds(BlockingRounds):
        def __init__(self) -> None:
            begun.set()
            assert may_go_on.wait(60)

    async with players(SlowRounds, 3) as (app, clients):
        turns = sit(clients)
        try:
            await eventually(begun.is_set)
            await clients[0].close()
            await eventually(lambda: app.sessions.active == 2)
        finally:
            may_go_on.set()
        assert not any(result.done for result in await asyncio.gather(*turns[1:]))
        assert [(await say(client, 1)).truncated for client in clients[1:]] == [True, True]
        assert (await asyncio.gather(turns[0], return_exceptions=True))[0] is not None


async def test_a_player_that_stalls_loses_its_seat_and_its_slot() -> None:
    async with players(Hasty, 3) as (app, clients):
        await asyncio.gather(*(client.reset() for client in clients))  # they are connected before time counts
        turns = sit(clients)
        await turns[0]
        assert (await turns[1]).observation["round"] == 1  # a policy has played for the first
        await eventually(lambda: app.sessions.active < 3)
        with pytest.raises((SessionError, ServerError)):
            await clients[0].step({"number": 1})
        turns[2].cancel()


async def test_a_table_that_gets_no_players_says_so() -> None:
    async with players(Hasty, 1) as (app, (client,)):
        with pytest.raises(ExecutionError, match="nobody took b, c within"):
            await client.reset(table="t")
        assert app.served.factory._gathering == {}  # type: ignore[attr-defined]


async def test_a_seat_that_is_taken_and_other_options_are_refused() -> None:
    async with players(Turns, 2) as (app, clients):
        waiting = asyncio.create_task(clients[0].reset(table="u", seat="b", seed=1))
        await eventually(lambda: app.served.factory._gathering)  # type: ignore[attr-defined]
        for options, message in [
            ({"seat": "b"}, "seat b of the table is taken"),
            ({"seed": 2}, "first session chose other values of seed;"),
            ({"seat": "x"}, 'to be "all", or one or several of a, b, c'),
            ({"policies": {"a": "seven"}}, "chose other values of policies;"),
            ({"policies": {"a": "no"}}, "expected the name of a policy"),
            ({"policies": {"a": ["guess"]}}, "expected the name of a policy"),
        ]:
            with pytest.raises(ExecutionError, match=message):
                await clients[1].reset(table="u", **options)
        assert not waiting.done()
        waiting.cancel()


async def test_the_error_of_a_game_names_no_secret_of_another_seat() -> None:
    async with players(Rounds, 3) as (_, clients):
        await asyncio.gather(*sit(clients))
        for result in await asyncio.gather(*(say(client, 99) for client in clients), return_exceptions=True):
            assert "Rounds failed, and its episode is over" in str(result)
            assert "secret" not in str(result)
        await asyncio.gather(*sit(clients))
        refused = await asyncio.gather(*sit(clients, rounds="many"), return_exceptions=True)
        assert all("reset options" in str(error) for error in refused)


async def test_where_one_session_holds_all_seats_a_failing_step_can_be_tried_again() -> None:
    async with players(Turns, 1) as (_, (client,)):
        await client.reset(seat="all")
        with pytest.raises(ExecutionError, match="a bug"):
            await client.step({"number": 99})
        assert (await client.step({"number": 9})).metadata["seat"] == "b"
        with pytest.raises(ExecutionError, match="rounds"):
            await client.reset(rounds="many")
        assert (await client.step({"number": 9})).metadata["seat"] == "c"


class Watched(Rounds):
    """Once the first seat has said 1, the policies of the others play on without end; 2 ends the first seat alone."""

    seats = ("a", "b")
    POLICIES = {"guess": lambda *_: Guess(number=3)}  # noqa: RUF012
    moves = 0

    @property
    def turn(self) -> tuple[str]:
        return ("b",) if self.round else ("a",)

    def step(self, actions: Any) -> Any:
        Watched.moves += 1
        seen = super().step(actions)
        ended = "a" in actions and actions["a"].number == 2
        return {
            seat: each.model_copy(update={"done": ended and seat == "a", "terminated": ended and seat == "a"})
            for seat, each in seen.items()
        }


async def test_policies_that_play_on_without_end_hold_up_nobody() -> None:
    async with players(create_app(Watched, max_concurrent_envs=2), 2) as (app, clients):
        await clients[0].reset()
        endless = say(clients[0], 1)
        await eventually(lambda: Watched.moves > 1000)
        assert (await clients[1].reset(seed=1)).observation["round"] == 0
        assert (await clients[1].step({"number": 2})).terminated
        assert not endless.done()
        await clients[0].disconnect()
        await eventually(lambda: app.sessions.active == 1)
        played = Watched.moves
        await clients[1].reset(seed=1)
        assert (await clients[1].step({"number": 2})).terminated  # nobody is left who would see the rest
        assert Watched.moves == played + 1
        await asyncio.gather(endless, return_exceptions=True)


async def test_poker_by_its_oracle() -> None:
    async with players(kuhn, 2) as (_, clients):
        first = asyncio.create_task(clients[0].reset(table="t", seed=3))
        second = asyncio.create_task(clients[1].reset(table="t", seed=3))
        assert (await first).observation["card"] == "J"
        first = asyncio.create_task(clients[0].step({"action": "bet"}))
        assert (await second).observation["history"] == "b"
        assert ((await clients[1].step({"action": "bet"})).reward, (await first).reward) == (2, -2)
        assert (await first).observation["opponent_card"] == "K"


def test_a_game_is_played_in_python_and_its_class_is_checked() -> None:
    game = Rounds()
    assert set(game.reset(seed=3, rounds=1)) == set(SEATS)
    assert game.state.seed == 3
    assert game.step({seat: Guess(number=2) for seat in SEATS})["b"].reward == 2
    with pytest.raises(EpisodeOverError):
        game.step({})

    def refuse(match: str, **members: Any) -> None:
        members = {"reset": lambda self: {}, "step": lambda self, actions: {}, "seats": ("a", "b"), **members}
        with pytest.raises(ConfigurationError, match=match):
            create_app(
                new_class(
                    "Game", (MultiAgentEnvironment[Add, Count],), exec_body=lambda body: body.update(members)
                )
            )

    async def step(self: Any, actions: Any) -> None: ...

    refuse("each once", seats=("a", "a"))
    refuse("plain methods", step=step)
    refuse("to be one of end, forfeit", ABSENT="random")
    refuse("define how", ABSENT="forfeit")
    refuse("seats of Game are unknown", seats=())
