"""Broken connections: sessions continue over another, and no step is lost or repeated."""

import asyncio
import json
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from counter import Add, Count, Counter, SlowBlocking
from counter_client import CounterEnv
from faulty_proxy import FaultyProxy, faulty_proxy
from serving import eventually, reconfigured, serving, socket_to
from v1_frames import validated_frames  # noqa: F401 - a fixture
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from openenv_core import ConfigurationError, ConnectionLostError, FactoryError, RequestTimeoutError
from openenv_core.client import conversation as conversing
from openenv_core.client.conversation import MAX_PENDING
from openenv_core.pending import Pending
from servers import create_app
from servers.app import EnvironmentApp
from servers.routes import link as server_link
from servers.sessions import AwaitedCall

pytestmark = pytest.mark.usefixtures("validated_frames")


class Tally(Counter):
    """Counts without a limit and returns the number of steps; declared nondeterministic, so nothing is replayed."""

    DETERMINISTIC = False

    def step(self, action: Add) -> Count:
        self._state.total += action.amount
        self._state.step_count += 1
        return Count(total=self._state.total, extra=self._state.step_count, reward=1)


class BlockingTally(Tally):
    BLOCKING = True


class Patient(SlowBlocking):
    """Hangs at the amount 99."""

    entries = 0

    def step(self, action: Add) -> Count:
        if action.amount != 99:
            return Counter.step(self, action)
        type(self).entries += 1
        return super().step(action)


def app_of(env: type[Counter], cap: int = 4) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap)


def v1_socket(address: str, query: str = "", **options: Any) -> AbstractAsyncContextManager[ClientConnection]:
    return socket_to(address, query, subprotocols=[Subprotocol("ropewalk.v1")], **options)


async def ask(connection: ClientConnection, **fields: Any) -> Any:
    await connection.send(json.dumps(fields))
    return json.loads(await asyncio.wait_for(connection.recv(), 20))


@asynccontextmanager
async def through_proxy(app: EnvironmentApp, **options: Any) -> AsyncIterator[tuple[FaultyProxy, CounterEnv]]:
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, **options) as client,
    ):
        yield proxy, client


def only_link(app: EnvironmentApp) -> server_link.Link:
    (link,) = app.links.registered.values()
    return link


@pytest.mark.parametrize("env", [Tally, BlockingTally])
@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_session_outlives_its_connection(env: type[Counter], how: str) -> None:
    app = app_of(env)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url) as client:
            await client.reset(seed=5)
            for number in range(1, 4):
                getattr(proxy, how)()
                observation = (await client.step(Add(amount=1))).observation
                assert (observation.total, observation.extra) == (5 + number, number)
            assert proxy.connections > 1
            assert app.sessions.active == 1
            link = only_link(app)
            assert (link.frames.count, len(link.frames._kept)) == (5, 1)  # frames that were read are gone
        await eventually(lambda: app.sessions.active == 0)  # a close in order ends the lease too


@pytest.mark.parametrize("ends", ["before it is resumed", "afterwards"])
async def test_executed_step_is_answered_after_a_break_and_not_repeated(ends: str) -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with through_proxy(app) as (proxy, client):
        await client.reset()
        step = asyncio.create_task(client.step(Add(amount=1)))
        await asyncio.to_thread(env.entered.wait, 20)
        broken = client._session.conversation.carrier
        proxy.cut()
        if ends == "afterwards":  # what the server has taken, and has not answered, is not sent again
            await eventually(lambda: client._session.conversation.carrier is not broken)
        env.release.set()
        await step
        assert env.stepping == 0
        assert proxy.connections == 2


def has_unsent_calls(conversation: Any) -> bool:
    return any(not call.sent for call in conversation._pending.values())


async def test_request_waiting_for_buffer_space_is_sent_over_the_next_connection_unless_cancelled() -> None:
    async with through_proxy(app_of(Tally)) as (proxy, client):
        await client.reset()
        client._session.conversation.carrier.write_paused = True
        step = asyncio.create_task(client.step(Add(amount=1)))
        await eventually(lambda: has_unsent_calls(client._session.conversation))
        proxy.cut()
        assert (await asyncio.wait_for(step, 20)).observation.extra == 1
        client._session.conversation.carrier.write_paused = True
        proxy.cut()
        while client._session.conversation._resume_task is None:  # type: ignore[attr-defined] # noqa: ASYNC110 - over in an instant
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(client.step(Add(amount=1)), 20)).observation.extra == 2
        conversation: Any = client._session.conversation
        conversation.carrier.write_paused = True
        step = asyncio.create_task(client.step(Add(amount=1)))
        await eventually(lambda: has_unsent_calls(conversation))
        step.cancel()
        await asyncio.wait([step])
        assert not conversation._pending
        conversation.carrier.resume_writing()
        assert (await client.step(Add(amount=1))).observation.extra == 3


async def test_half_open_connection_is_replaced() -> None:
    options = {"websocket_ping_interval_s": 0.1, "websocket_ping_timeout_s": 1.5}
    app = app_of(Tally)
    async with through_proxy(app, **options) as (proxy, client):
        await client.reset(seed=5)
        proxy.hold()  # the server hears of nothing, and would keep the old connection
        assert (await client.step(Add(amount=1))).observation.extra == 1
        assert (await client.step(Add(amount=1))).observation.extra == 2
        assert proxy.connections == 2
        await eventually(lambda: len(app.sockets._conversations) == 1)


@pytest.mark.parametrize(
    "think_s",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(240, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
async def test_idle_client_keeps_its_session_and_a_half_open_one_is_detected(think_s: int) -> None:
    app = app_of(Tally)
    pings = {} if think_s else {"ws_ping_interval": 0.05, "ws_ping_timeout": 2.0}
    often = {} if think_s else {"websocket_ping_interval_s": 0.05, "lease_s": 0.2}
    async with (
        serving(app, **pings) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url, **often) as client,
    ):
        await client.reset()
        passed_before = proxy.passed
        await asyncio.sleep(think_s)
        await eventually(lambda: proxy.passed > passed_before + 20)  # both ask, and both answer
        assert (await client.step(Add(amount=1))).observation.extra == 1
        assert proxy.connections == 1
        if not think_s:
            proxy.hold()  # the client does not look for so long; the server does
            await eventually(lambda: app.sessions.active == 0)


async def test_client_in_the_queue_waits_on_over_another_connection() -> None:
    async with serving(app_of(Tally, cap=1)) as address, faulty_proxy(address) as proxy:
        second = CounterEnv(proxy.url, lease_s=1.0)
        async with CounterEnv(f"http://{address}"):
            waits = asyncio.create_task(second.reset(seed=3))
            await eventually(
                lambda: second._session.conversation and second._session.conversation._frames_read
            )
            proxy.cut()
            await eventually(lambda: proxy.connections == 2)
        assert (await waits).observation.total == 3
        proxy.cut()
        assert (await second.step(Add(amount=1))).observation.total == 4
        await second.close()


async def test_expired_lease_frees_its_slots_and_is_reported() -> None:
    app = app_of(Tally)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url, lease_s=0.1) as client:
            await client.reset()
            proxy.cut_after = lambda: (10, 10)
            proxy.cut()
            await eventually(lambda: app.sessions.active == 0)
            assert not app.links.registered
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
async def test_stopping_or_missing_server_is_not_waited_for(stops: str) -> None:
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


async def test_restarting_ingress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversing, "MAX_REFUSED_CONNECTS", 1)
    async with through_proxy(app_of(Tally)) as (proxy, client):
        await client.reset()
        connect, attempts = conversing.open_socket, []

        async def counted_open(url: str, options: Any) -> Any:
            attempts.append(url)
            return await connect(url, options)

        monkeypatch.setattr(conversing, "open_socket", counted_open)
        proxy.stop()
        await eventually(lambda: len(attempts) > 1)
        async with await asyncio.start_server(proxy.serve, "127.0.0.1", proxy.port):
            assert (await client.step(Add(amount=1))).observation.extra == 1
            await client.close()


@pytest.mark.parametrize("code", [1000, 1001, 1011])
async def test_sessions_outlive_a_close_only_if_its_code_means_a_break(code: int) -> None:
    """1011 is what websocket libraries send if the server does not answer their ping."""
    app = app_of(Tally)
    async with serving(app) as address:
        async with v1_socket(address) as first:
            reply = await ask(first, id=1, op="open", lease_s=20)
            await first.close(code)
        resume_fields = {"session": reply["session"], "secret": reply["secret"], "read": 1}
        async with v1_socket(address) as second:
            assert ("taken" in await ask(second, id=0, op="resume", **resume_fields)) == (code == 1011)


async def test_link_without_sessions_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(Tally, cap=1)
    monkeypatch.setattr(server_link, "OPEN_TIMEOUT_S", 0.1)
    async with serving(app) as address, v1_socket(address) as silent:
        async with v1_socket(address) as first, v1_socket(address) as in_vain:
            reply = await ask(first, id=1, op="open", lease_s=1e9)
            assert reply["lease_s"] == server_link.MAX_LEASE_S
            await in_vain.send(json.dumps({"id": 1, "op": "open", "wait_s": 0.3}))
            for idle in (silent, in_vain):
                await asyncio.wait_for(idle.wait_closed(), 20)
                assert idle.close_code == 1000
            await ask(first, id=2, op="close", members=[0])
            assert app.links.registered
            first.transport.abort()
        await eventually(lambda: not app.links.registered)


async def test_vector_is_resumed_with_its_running_requests() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with through_proxy(app) as (proxy, client):
        vector = await client.vector(3)
        await vector.ask("reset", seeds=[1, 2, 3])
        await vector.send("step", members=[0, 1], actions=[{"amount": 1}, {"amount": 99}], at_least=1)
        assert (await vector.recv()).fields["members"] == [0]
        await asyncio.to_thread(env.entered.wait, 20)
        proxy.cut()
        env.release.set()
        reply = await vector.recv()
        assert (reply.fields["members"], reply.last) == ([1], True)
        for _ in range(3):  # of which always one is unread
            await vector.send("state", members=[0])
        for _ in range(10):
            await vector.send("state", members=[0])
            await vector.recv()
        await eventually(lambda: not vector._outstanding)
        for _ in range(3):
            await vector.recv()
        (reply,) = await vector.ask("state")
        assert [row["step_count"] for row in reply.fields["rows"]] == [1, 0, 0]
        await vector.close()
        await eventually(lambda: app.sessions.active == 1)  # the client's own


async def test_resuming_needs_the_secret_and_the_owning_token() -> None:
    app = reconfigured(app_of(Tally), tokens=("one-token-of-good-length", "another-token-of-such"))
    mine, other = ({"Authorization": f"Bearer {token}"} for token in app.settings.tokens)
    async with serving(app) as address:
        async with v1_socket(address, additional_headers=mine) as first:
            reply = await ask(first, id=1, op="open", lease_s=20)
            assert (reply["members"], reply["lease_s"]) == ([0], 20)
            await ask(first, id=2, type="reset", data={"seed": 4}, read=1)
            first.transport.abort()
        known = {"session": reply["session"], "secret": reply["secret"]}
        refusals = []
        for headers, change in (
            (other, {}),
            (mine, {"secret": "guessed"}),
            (mine, {"secret": reply["secret"][:-1]}),
            (mine, {"session": "guessed"}),
            (mine, {"read": 0}),  # which the server has been told to forget
            (mine, {"read": 3}),
        ):
            async with v1_socket(address, additional_headers=headers) as second:
                resume_fields = {"read": 1, **known, **change}
                refusals.append((await ask(second, id=0, op="resume", **resume_fields))["error"])
        assert [refusal["code"] for refusal in refusals] == ["SESSION_ERROR"] * 6
        assert len({refusal["message"] for refusal in refusals}) == 1
        async with v1_socket(address, additional_headers=mine) as third:
            reply = await ask(third, id=0, op="resume", read=1, **known)
            assert (reply["taken"], reply["last"]) == (2, True)
            assert json.loads(await third.recv())["data"]["observation"]["total"] == 4
            assert (await ask(third, id=2, type="state"))["error"]["code"] == "VALIDATION_ERROR"  # ids rise
            assert (await ask(third, id=3, type="state", read=2))["data"]["total"] == 4
        await eventually(lambda: app.sessions.active == 0)


async def test_queued_request_is_answered_over_the_next_connection() -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        standing = await app.sessions.open("", "own")
        async with v1_socket(address, "?session_id=own") as first:
            opened_reply = await ask(first, id=1, op="open", lease_s=20)
            release = asyncio.Event()
            holding = asyncio.create_task(
                standing.perform(AwaitedCall(lambda: Pending(release.wait()), True))
            )
            await eventually(lambda: standing.busy)
            await first.send(json.dumps({"id": 2, "type": "step", "data": {"amount": 1}}))
            link = only_link(app)
            await eventually(lambda: link.last_id == 2)
            known = {"session": opened_reply["session"], "secret": opened_reply["secret"], "read": 1}
            async with v1_socket(address) as second:
                assert (await ask(second, id=0, op="resume", **known))["taken"] == 2
                release.set()
                assert json.loads(await asyncio.wait_for(second.recv(), 20))["type"] == "observation"
            await holding


async def test_close_that_is_under_way_when_the_connection_breaks_ends_the_session() -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        standing = await app.sessions.open("", "own")
        async with v1_socket(address, "?session_id=own") as connection:
            await ask(connection, id=1, op="open", lease_s=600)
            link = only_link(app)
            release = asyncio.Event()
            holding = asyncio.create_task(
                standing.perform(AwaitedCall(lambda: Pending(release.wait()), True))
            )
            await eventually(lambda: standing.busy)
            await connection.send(json.dumps({"id": 2, "type": "step", "data": {"amount": 1}}))
            await connection.send(json.dumps({"id": 3, "type": "close"}))
            await eventually(lambda: link.last_id == 3)
            connection.transport.abort()
            await eventually(lambda: link.conversation is None)
            assert standing.attachment
            release.set()
            await eventually(lambda: not standing.attachment)
            await holding


class Long(Tally):
    """Returns more than a socket takes at once."""

    def step(self, action: Add) -> Count:
        return Count(extra="x" * 32 * 1024 * 1024)


async def test_close_before_a_break_ends_the_session_although_a_reply_is_unread() -> None:
    app = app_of(Long)
    async with serving(app) as address:
        async with v1_socket(address, max_size=None) as connection:
            await ask(connection, id=1, op="open", lease_s=600)
            connection.transport.pause_reading()
            link = only_link(app)
            for number in (2, 3):
                await connection.send(json.dumps({"id": number, "type": "step", "data": {"amount": 1}}))
            await eventually(lambda: link.conversation and not link.running)
            await connection.send(json.dumps({"id": 4, "type": "close"}))
            await eventually(lambda: link.conversation and not link.conversation.connection.broken)
            connection.transport.abort()
        await eventually(lambda: app.sessions.active == 0)


@pytest.mark.parametrize("closes", [True, False])
async def test_close_that_the_server_has_not_read_when_it_writes_to_a_reset_connection_counts(
    closes: bool,
) -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        async with v1_socket(address) as connection:
            await ask(connection, id=1, op="open", lease_s=600)
            link = only_link(app)
            conversation: Any = link.conversation
            conversation.connection._protocol.transport.pause_reading()
            if closes:
                connection.protocol.send_close(1000)
                connection.transport.write(b"".join(connection.protocol.data_to_send()))
            connection.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            connection.transport.abort()

        def has_ended() -> bool:
            link.send('{"id":0,"type":"state","data":{}}')  # which fails, if it is not the first
            return link.closed or link.conversation is None

        await eventually(has_ended)
        assert link.closed is closes
        await link.close()
        await eventually(lambda: app.sessions.active == 0)  # another task may be closing it


@pytest.mark.parametrize("subprotocol", ["ropewalk.v1", None])
async def test_dead_client_does_not_block_its_standing_session(subprotocol: Any) -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        session = await app.sessions.open("", "own")
        async with v1_socket(address, "?session_id=own") as first:
            known = await ask(first, id=1, op="open", lease_s=600)
            step = {"type": "step", "data": {"amount": 1}}
            assert (await ask(first, id=2, **step))["type"] == "observation"
            first.transport.abort()
        one = only_link(app)
        await eventually(lambda: one.conversation is None)
        offered = [subprotocol] if subprotocol else None
        async with socket_to(address, "?session_id=own", subprotocols=offered) as second:
            if subprotocol:
                assert (await ask(second, id=1, op="open"))["members"] == [0]
            observation = (await ask(second, **({"id": 2} if subprotocol else {}), **step))["data"][
                "observation"
            ]
            assert observation["total"] == 2
            assert session.attachment
            async with v1_socket(address) as third:
                resume_fields = {"session": known["session"], "secret": known["secret"], "read": 1}
                assert "error" in await ask(third, id=0, op="resume", **resume_fields)


async def test_session_that_stands_is_closed_although_its_broken_socket_may_come_back() -> None:
    app = app_of(Tally)
    async with serving(app) as address:
        session = await app.sessions.open("", "own")
        async with v1_socket(address, "?session_id=own") as connection:
            await ask(connection, id=1, op="open", lease_s=600)
            connection.transport.abort()
        link = only_link(app)
        await eventually(lambda: link.conversation is None)
        assert await app.sessions.close(session)
        assert (app.sessions.active, link.closed) == (0, True)


async def test_late_or_cancelled_request_is_not_executed() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with serving(app) as address, v1_socket(address) as connection:
        await ask(connection, id=1, op="open")
        step = {"type": "step", "data": {"amount": 99}}
        await connection.send(json.dumps({"id": 2, **step}))
        await asyncio.to_thread(env.entered.wait, 20)
        late = await ask(connection, id=3, **step, deadline_s=0.01)
        assert (late["id"], late["type"], late["data"]["code"]) == (3, "error", "NOT_EXECUTED")
        await connection.send(json.dumps({"id": 4, **step}))
        replies = [await ask(connection, id=5, op="cancel", request=4), json.loads(await connection.recv())]
        assert sorted(one["id"] for one in replies) == [4, 5]
        assert "cancelled" in next(one for one in replies if one["id"] == 4)["data"]["message"]
        await connection.send(json.dumps({"id": 6, "op": "cancel", "request": 2}))  # which has begun
        assert json.loads(await connection.recv()) == {"id": 6, "last": True}
        env.release.set()
        replies = [json.loads(await connection.recv())]
        assert (replies[0]["id"], replies[0]["type"]) == (2, "observation")


@pytest.mark.slow
async def test_timed_out_request_is_not_executed_and_keeps_the_order() -> None:
    env = Patient.fresh()
    app = app_of(env)
    async with serving(app) as address, CounterEnv(f"http://{address}", message_timeout_s=1.0) as client:
        for _ in range(2):
            with pytest.raises(RequestTimeoutError):
                await client.step(Add(amount=99))
        link = only_link(app)
        await eventually(lambda: len(link.running) == 1)
        client._session.conversation._timeout_s = 60  # type: ignore[union-attr]
        env.release.set()
        assert (await client.step(Add(amount=2))).observation.total == 2
        assert env.entries == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_late_answer_to_an_open_still_counts(fails: bool) -> None:
    release, failing = threading.Event(), [fails]

    class SlowToMake(BlockingTally):
        def __init__(self) -> None:
            super().__init__()
            release.wait(20)
            if failing and failing.pop():
                raise RuntimeError("no table is free")

    app = app_of(SlowToMake)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url, message_timeout_s=0.05) as client:
            with pytest.raises(RequestTimeoutError):
                await client.reset()
            client._session.settings = replace(client._session.settings, message_timeout_s=20)
            client._session.conversation._timeout_s = 20  # type: ignore[union-attr]
            release.set()
            if fails:
                with pytest.raises(FactoryError, match="no table is free") as failed:
                    await client.reset()
                assert failed.value.factory_name == "SlowToMake"
            await client.reset(seed=5)
            proxy.cut()
            assert (await client.step(Add(amount=1))).observation.total == 6
        await eventually(lambda: app.sessions.active == 0)


async def test_cancellation_works_with_any_number_of_pending_requests() -> None:
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
            observation = (await client.step(Add(amount=2 * number))).observation
            assert (observation.extra, observation.total) == (number, number * (number + 1))


BREAKS = [
    (Tally, 15),
    (BlockingTally, 15),
    pytest.param(Tally, 1000, marks=pytest.mark.slow),
    pytest.param(BlockingTally, 1000, marks=pytest.mark.soak),
    pytest.param(Tally, 10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize(("env", "breaks"), BREAKS)
async def test_no_step_is_lost_or_repeated_wherever_a_connection_breaks(
    env: type[Counter], breaks: int
) -> None:
    app = app_of(env)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        await play(proxy, random.Random(breaks), breaks)
        await eventually(lambda: app.sessions.active == 0)
