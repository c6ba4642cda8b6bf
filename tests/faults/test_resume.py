"""Connections that break: sessions go on over another, and no step is lost or taken twice."""

import asyncio
import json
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from counter import Add, Count, Counter, SlowBlocking
from counter_client import CounterEnv
from faulty_proxy import FaultyProxy, faulty_proxy
from serving import eventually, serving, socket_to
from v1_frames import held_frames  # noqa: F401 - a fixture
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from openenv_core import ConfigurationError, ConnectionLostError, FactoryError, RequestTimeoutError
from openenv_core.client import conversation as conversing
from openenv_core.client.conversation import MAX_PENDING
from servers import create_app
from servers.app import EnvironmentApp
from servers.routes import link as server_link

pytestmark = pytest.mark.usefixtures("held_frames")


class Tally(Counter):
    """Counts without an end; what it says tells how often it was asked. Nothing of it is played again elsewhere."""

    DETERMINISTIC = False

    def step(self, action: Add) -> Count:
        self._state.total += action.amount
        self._state.step_count += 1
        return Count(total=self._state.total, extra=self._state.step_count, reward=1)


class BlockingTally(Tally):
    BLOCKING = True


class Patient(SlowBlocking):
    """Hangs at 99."""

    entries = 0

    def step(self, action: Add) -> Count:
        if action.amount != 99:
            return Counter.step(self, action)
        type(self).entries += 1
        return super().step(action)


def app_of(env: type[Counter], cap: int = 4) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap)


@pytest.mark.parametrize("env", [Tally, BlockingTally])
@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_a_session_outlives_its_connection(env: type[Counter], how: str) -> None:
    app = app_of(env)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url) as client:
            await client.reset(seed=5)
            for number in range(1, 4):
                getattr(proxy, how)()
                seen = (await client.step(Add(amount=1))).observation
                assert (seen.total, seen.extra) == (5 + number, number)
            assert proxy.connections > 1
            assert app.sessions.active == 1
            (link,) = app._ensure_built().links._links.values()
            assert (link.frame_count, len(link._retained_frames)) == (5, 1)  # frames that were read are gone
        await eventually(lambda: app.sessions.active == 0)  # a close in order ends the lease too


@pytest.mark.parametrize("ends", ["before it is resumed", "afterwards"])
async def test_a_step_that_was_executed_is_answered_and_not_executed_again(ends: str) -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url) as client,
    ):
        await client.reset()
        step = asyncio.create_task(client.step(Add(amount=1)))
        await asyncio.to_thread(env.entered.wait, 20)
        assert client._conversation is not None
        broken = client._conversation.carrier
        proxy.cut()
        if ends == "afterwards":  # what the server has taken, and has not answered, is not sent again
            await eventually(lambda: client._conversation.carrier is not broken)
        env.release.set()
        await step
        assert env.stepping == 0
        assert proxy.connections == 2


def unsent(conversation: Any) -> bool:
    return any(not call.sent for call in conversation._pending.values())


async def test_what_waits_for_room_when_the_connection_breaks_leaves_over_the_next() -> None:
    async with (
        serving(app_of(Tally)) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url) as client,
    ):
        await client.reset()
        assert client._conversation is not None
        client._conversation.carrier.write_paused = True
        step = asyncio.create_task(client.step(Add(amount=1)))
        await eventually(lambda: unsent(client._conversation))
        proxy.cut()
        assert (await asyncio.wait_for(step, 20)).observation.extra == 1
        client._conversation.carrier.write_paused = True
        proxy.cut()
        while client._conversation._resume_task is None:  # type: ignore[attr-defined] # noqa: ASYNC110 - over in an instant
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(client.step(Add(amount=1)), 20)).observation.extra == 2


async def test_what_waits_for_room_and_is_given_up_never_leaves() -> None:
    async with serving(app_of(Tally)) as address, CounterEnv(f"http://{address}") as client:
        await client.reset()
        conversation: Any = client._conversation
        conversation.carrier.write_paused = True
        step = asyncio.create_task(client.step(Add(amount=1)))
        await eventually(lambda: unsent(conversation))
        step.cancel()
        await asyncio.wait([step])
        assert not conversation._pending
        conversation.carrier.resume_writing()
        assert (await client.step(Add(amount=1))).observation.extra == 1


async def test_a_connection_that_nobody_knows_to_be_dead_is_replaced() -> None:
    options = {"websocket_ping_interval_s": 0.1, "websocket_ping_timeout_s": 1.5}
    app = app_of(Tally)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, **options) as client,
    ):
        await client.reset(seed=5)
        proxy.hold()  # the server hears of nothing, and would keep the old connection
        assert (await client.step(Add(amount=1))).observation.extra == 1
        assert (await client.step(Add(amount=1))).observation.extra == 2
        assert proxy.connections == 2
        await eventually(lambda: len(app._ensure_built().sockets._conversations) == 1)


THINKS = [
    pytest.param(0, marks=pytest.mark.slow),
    pytest.param(240, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
]


@pytest.mark.parametrize("think_s", THINKS)
async def test_a_policy_that_thinks_keeps_its_session_and_a_half_open_one_is_found(think_s: int) -> None:
    app = app_of(Tally)
    pings = {} if think_s else {"ws_ping_interval": 0.05, "ws_ping_timeout": 2.0}
    often = {} if think_s else {"websocket_ping_interval_s": 0.05, "lease_s": 0.2}
    async with (
        serving(app, **pings) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, **often) as client,
    ):
        await client.reset()
        said = proxy.passed
        await asyncio.sleep(think_s)
        await eventually(lambda: proxy.passed > said + 20)  # both ask, and both answer
        assert (await client.step(Add(amount=1))).observation.extra == 1
        assert proxy.connections == 1
        if not think_s:
            proxy.hold()  # the client does not look for so long; the server does
            await eventually(lambda: app.sessions.active == 0)


async def test_a_lease_that_is_over_gives_its_slots_back_and_is_told() -> None:
    app = app_of(Tally)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url, lease_s=0.1) as client:
            await client.reset()
            proxy.cut_after = lambda: (10, 10)
            proxy.cut()
            await eventually(lambda: app.sessions.active == 0)
            with pytest.raises(
                ConnectionLostError, match=r"could not be resumed: no connection within its lease"
            ):
                await client.step(Add(amount=1))
            proxy.cut_after = lambda: (None, None)
            assert (await client.reset(seed=3)).observation.total == 3
        async with CounterEnv(proxy.url, lease_s=0) as client:
            await client.reset()
            proxy.cut()
            with pytest.raises(ConnectionLostError):
                await client.step(Add(amount=1))
            await eventually(lambda: app.sessions.active == 0)


@pytest.mark.parametrize("stops", ["drained", "gone"])
async def test_a_server_that_stops_or_is_gone_is_not_waited_for(stops: str) -> None:
    app = app_of(Tally)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        client = CounterEnv(f"http://{address}" if stops == "drained" else [proxy.url, proxy.url])
        await client.reset()
        if stops == "drained":
            await app.drain(20)
            assert app.sessions.active == 0
        else:
            proxy.stop()
        with pytest.raises(ConnectionLostError, match=r"going away|resumed: .*check that it runs"):
            await client.step(Add(amount=1))
        await client.close()


async def test_an_ingress_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversing, "MAX_REFUSED_CONNECTS", 1)
    async with (
        serving(app_of(Tally)) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url) as client,
    ):
        await client.reset()
        connect, attempts = conversing.open_socket, []

        async def counted(url: str, options: Any) -> Any:
            attempts.append(url)
            return await connect(url, options)

        monkeypatch.setattr(conversing, "open_socket", counted)
        proxy.stop()
        await eventually(lambda: len(attempts) > 1)
        async with await asyncio.start_server(proxy.serve, "127.0.0.1", proxy.port):
            assert (await client.step(Add(amount=1))).observation.extra == 1
            await client.close()


async def test_a_lease_is_no_longer_than_a_server_allows() -> None:
    options: Any = {"subprotocols": ["ropewalk.v1"]}
    async with serving(app_of(Tally)) as address, socket_to(address, **options) as connection:
        told = await ask(connection, id=1, op="open", lease_s=1e9)
        assert told["lease_s"] == server_link.MAX_LEASE_S


async def test_a_lease_that_is_over_resumes_nobody() -> None:
    app = app_of(Tally)
    async with serving(app) as address, faulty_proxy(address) as proxy, CounterEnv(proxy.url) as client:
        await client.reset()
        (one,) = app._ensure_built().links._links.values()
        one._expire()
        assert not app._ensure_built().links._links


async def test_a_client_that_has_no_sessions_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(Tally)
    monkeypatch.setattr(server_link, "OPEN_TIMEOUT_S", 0.1)
    v1 = Subprotocol("ropewalk.v1")
    async with serving(app) as address, socket_to(address, subprotocols=[v1]) as silent:
        async with socket_to(address, subprotocols=[v1]) as first:
            await ask(first, id=1, op="open", lease_s=600)
            await silent.wait_closed()
            assert silent.close_code == 1000
            await ask(first, id=2, op="close", members=[0])
            assert app._ensure_built().links._links
            first.transport.abort()
        await eventually(lambda: not app._ensure_built().links._links)


async def test_a_vector_is_resumed_with_all_that_is_under_way() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url) as client,
    ):
        vector = await client.vector(3)
        await vector.ask("reset", seeds=[1, 2, 3])
        await vector.send("step", members=[0, 1], actions=[{"amount": 1}, {"amount": 99}], at_least=1)
        assert (await vector.recv()).fields["members"] == [0]
        await asyncio.to_thread(env.entered.wait, 20)
        proxy.cut()
        env.release.set()
        told = await vector.recv()
        assert (told.fields["members"], told.last) == ([1], True)
        for _ in range(3):  # of which always one is unread
            await vector.send("state", members=[0])
        for _ in range(10):
            await vector.send("state", members=[0])
            await vector.recv()
        await eventually(lambda: not vector._outstanding)
        for _ in range(3):
            await vector.recv()
        (told,) = await vector.ask("state")
        assert [row["step_count"] for row in told.fields["rows"]] == [1, 0, 0]
        await vector.close()
        await eventually(lambda: app.sessions.active == 1)  # the client's own


async def ask(connection: ClientConnection, **fields: Any) -> Any:
    await connection.send(json.dumps(fields))
    return json.loads(await asyncio.wait_for(connection.recv(), 20))


async def test_only_who_knows_the_secret_and_owns_the_session_resumes_it() -> None:
    app = app_of(Tally)
    app.configure(replace(app.settings, tokens=("one-token-of-good-length", "another-token-of-such")))
    mine, other = ({"Authorization": f"Bearer {token}"} for token in app.settings.tokens)
    options: Any = {"subprotocols": ["ropewalk.v1"]}
    async with serving(app) as address:
        async with socket_to(address, additional_headers=mine, **options) as first:
            told = await ask(first, id=1, op="open", lease_s=20)
            assert (told["members"], told["lease_s"]) == ([0], 20)
            await ask(first, id=2, type="reset", data={"seed": 4}, read=1)
            first.transport.abort()
        known = {"session": told["session"], "secret": told["secret"]}
        refusals = []
        for headers, said in (
            (other, {}),
            (mine, {"secret": "guessed"}),
            (mine, {"secret": told["secret"][:-1]}),
            (mine, {"session": "guessed"}),
            (mine, {"read": 0}),  # which the server has been told to forget
            (mine, {"read": 3}),
        ):
            async with socket_to(address, additional_headers=headers, **options) as second:
                asked = {"read": 1, **known, **said}
                refusals.append((await ask(second, id=0, op="resume", **asked))["error"])
        assert [refusal["code"] for refusal in refusals] == ["SESSION_ERROR"] * 6
        assert len({refusal["message"] for refusal in refusals}) == 1
        async with socket_to(address, additional_headers=mine, **options) as third:
            told = await ask(third, id=0, op="resume", read=1, **known)
            assert (told["taken"], told["last"]) == (2, True)
            assert json.loads(await third.recv())["data"]["observation"]["total"] == 4
            assert (await ask(third, id=2, type="state"))["error"]["code"] == "VALIDATION_ERROR"  # ids rise
            assert (await ask(third, id=3, type="state", read=2))["data"]["total"] == 4
        await eventually(lambda: app.sessions.active == 0)


async def test_what_waits_for_its_turn_when_the_connection_breaks_is_answered_over_the_next() -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        standing = await app.sessions.open("", "own")
        async with socket_to(address, "?session_id=own", subprotocols=[Subprotocol("ropewalk.v1")]) as first:
            told = await ask(first, id=1, op="open", lease_s=20)
            await standing._acquire()  # as a caller over HTTP
            await first.send(json.dumps({"id": 2, "type": "step", "data": {"amount": 1}}))
            (link,) = app._ensure_built().links._links.values()
            await eventually(lambda: link.last_id == 2)
            known = {"session": told["session"], "secret": told["secret"], "read": 1}
            async with socket_to(address, subprotocols=[Subprotocol("ropewalk.v1")]) as second:
                assert (await ask(second, id=0, op="resume", **known))["taken"] == 2
                standing._release_lock()
                assert json.loads(await asyncio.wait_for(second.recv(), 20))["type"] == "observation"


@pytest.mark.parametrize("subprotocol", ["ropewalk.v1", None])
async def test_a_client_that_dies_keeps_nobody_out_of_a_session_that_stands(subprotocol: Any) -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        session = await app.sessions.open("", "own")
        async with socket_to(address, "?session_id=own", subprotocols=[Subprotocol("ropewalk.v1")]) as first:
            known = await ask(first, id=1, op="open", lease_s=600)
            step = {"type": "step", "data": {"amount": 1}}
            assert (await ask(first, id=2, **step))["type"] == "observation"
            first.transport.abort()
        (one,) = app._ensure_built().links._links.values()
        await eventually(lambda: one.conversation is None)
        offered = [subprotocol] if subprotocol else None
        async with socket_to(address, "?session_id=own", subprotocols=offered) as second:
            if subprotocol:
                assert (await ask(second, id=1, op="open"))["members"] == [0]
            seen = (await ask(second, **({"id": 2} if subprotocol else {}), **step))["data"]["observation"]
            assert seen["total"] == 2
            assert session.attached
            async with socket_to(address, subprotocols=[Subprotocol("ropewalk.v1")]) as third:
                said = {"session": known["session"], "secret": known["secret"], "read": 1}
                assert "error" in await ask(third, id=0, op="resume", **said)


async def test_what_has_not_begun_by_its_deadline_or_is_cancelled_is_not_executed() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with (
        serving(app) as address,
        socket_to(address, subprotocols=[Subprotocol("ropewalk.v1")]) as connection,
    ):
        await ask(connection, id=1, op="open")
        step = {"type": "step", "data": {"amount": 99}}
        await connection.send(json.dumps({"id": 2, **step}))
        await asyncio.to_thread(env.entered.wait, 20)
        late = await ask(connection, id=3, **step, deadline_s=0.01)
        assert (late["id"], late["type"], late["data"]["code"]) == (3, "error", "NOT_EXECUTED")
        await connection.send(json.dumps({"id": 4, **step}))
        told = [await ask(connection, id=5, op="cancel", request=4), json.loads(await connection.recv())]
        assert sorted(one["id"] for one in told) == [4, 5]
        assert "cancelled" in next(one for one in told if one["id"] == 4)["data"]["message"]
        await connection.send(json.dumps({"id": 6, "op": "cancel", "request": 2}))  # which has begun
        assert json.loads(await connection.recv()) == {"id": 6, "last": True}
        env.release.set()
        told = [json.loads(await connection.recv())]
        assert (told[0]["id"], told[0]["type"]) == (2, "observation")


@pytest.mark.slow
async def test_a_request_that_nobody_waits_for_is_not_begun_and_shifts_no_reply() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with serving(app) as address, CounterEnv(f"http://{address}", message_timeout_s=1.0) as client:
        for _ in range(2):
            with pytest.raises(RequestTimeoutError):
                await client.step(Add(amount=99))
        (link,) = app._ensure_built().links._links.values()
        await eventually(lambda: len(link.running) == 1)
        client._conversation._timeout_s = 60  # type: ignore[union-attr]
        env.release.set()
        assert (await client.step(Add(amount=2))).observation.total == 2
        assert env.entries == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_an_open_that_is_answered_late_counts(fails: bool) -> None:
    made, failing = threading.Event(), [fails]

    class SlowToMake(BlockingTally):
        def __init__(self) -> None:
            super().__init__()
            made.wait(20)
            if failing and failing.pop():
                raise RuntimeError("no table is free")

    app = app_of(SlowToMake)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url, message_timeout_s=0.05) as client:
            with pytest.raises(RequestTimeoutError):
                await client.reset()
            client._timeout_s = client._conversation._timeout_s = 20  # type: ignore[union-attr]
            made.set()
            if fails:
                with pytest.raises(FactoryError, match="no table is free"):
                    await client.reset()
            await client.reset(seed=5)
            proxy.cut()
            assert (await client.step(Add(amount=1))).observation.total == 6
        await eventually(lambda: app.sessions.active == 0)


async def test_who_is_cancelled_is_so_however_many_requests_wait() -> None:
    env = Patient.fresh()
    async with serving(app_of(env)) as address, CounterEnv(f"http://{address}") as client:
        vector = await client.vector(1)
        step = asyncio.create_task(vector.ask("step", actions=[{"amount": 99}]))
        await asyncio.to_thread(env.entered.wait, 20)
        for _ in range(MAX_PENDING - 1):
            await vector.send("state")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        with pytest.raises(ConfigurationError, match="wait for some of these"):
            await vector.send("state")
        env.release.set()
        await vector.close()


async def play(proxy: FaultyProxy, rng: random.Random, breaks: int) -> None:
    """Play an episode while connections break at any byte of either way."""

    def limits() -> tuple[int | None, int | None]:
        if proxy.connections >= breaks:
            return None, None
        # A handshake has about 250 bytes each way, a resume 150, a step 70.
        return (rng.randrange(200, 900), None) if rng.random() < 0.5 else (None, rng.randrange(150, 600))

    async with CounterEnv(proxy.url) as client:
        await client.reset(seed=0)
        proxy.cut_after = limits
        proxy.cut()
        number = 0
        while proxy.connections < breaks:
            number += 1
            seen = (await client.step(Add(amount=2 * number))).observation
            assert (seen.extra, seen.total) == (number, number * (number + 1))


BREAKS = [
    (Tally, 15),
    (BlockingTally, 15),
    pytest.param(Tally, 1000, marks=pytest.mark.slow),
    pytest.param(BlockingTally, 1000, marks=pytest.mark.soak),
    pytest.param(Tally, 10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize(("env", "breaks"), BREAKS)
async def test_no_step_is_lost_and_none_is_taken_twice_wherever_a_connection_breaks(
    env: type[Counter], breaks: int
) -> None:
    app = app_of(env)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        await play(proxy, random.Random(breaks), breaks)
        await eventually(lambda: app.sessions.active == 0)
