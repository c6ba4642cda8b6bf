"""The client over plain HTTP: sessions, order of replies, statuses, servers without sessions."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from counter import Add, Count, Counter
from counter_client import CounterEnv
from scripted import url_of
from serving import eventually, serving

from openenv_core import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConnectionFailedError,
    ExecutionError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionError,
    ValidationFailedError,
)
from openenv_core.protocol.http import SESSION_HEADER, retry_after
from servers import create_app

Answer = tuple[int, dict[str, str], Any]


@asynccontextmanager
async def answering(handler: Callable[[str, str, bytes], Awaitable[Answer]]) -> AsyncIterator[str]:
    """A server that answers plain HTTP as a test says: (method, path, body) to (status, headers, body)."""

    connections: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())  # type: ignore[arg-type]
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                method, path, _ = head.split(" ", 2)
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                status, headers, answer = await handler(method, path, await reader.readexactly(length))
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                fields = {**headers, "Content-Length": len(body)}
                lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                writer.write(f"HTTP/1.1 {status} So\r\n{lines}\r\n".encode() + body)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield url_of(server)
        finally:
            for connection in connections:
                connection.cancel()


def result(total: int) -> dict[str, Any]:
    return {"observation": {"total": total}, "reward": 1.0, "done": False}


async def test_an_episode_over_plain_http() -> None:
    app = create_app(Counter, Add, Count, max_concurrent_envs=4)
    async with serving(app) as address:
        async with (
            CounterEnv(f"http://{address}", transport="http") as one,
            CounterEnv(f"ws://{address}/ws", transport="http") as two,
        ):
            with pytest.raises(SessionError, match="Unknown session"):
                await one.step(Add(amount=1))
            assert (await one.reset(seed=3, episode_id="e")).observation.total == 3
            assert (await two.reset(seed=1)).observation.total == 1
            assert (await one.step(Add(amount=4))).observation == Count(total=7, reward=1, done=False)
            assert (await one.state()).episode_id == "e"
            with pytest.raises(ValidationFailedError, match="amount: Input should be"):
                await one.step({"amount": "x"})  # type: ignore[arg-type]
            with pytest.raises(ValidationFailedError, match="seed: Input should be"):
                await one.reset(seed=-1)
            assert (await one.step(Add(amount=3))).done
            with pytest.raises(ExecutionError, match=r"call reset\(\)"):
                await one.step(Add(amount=1))
            assert (await one.reset(seed=0)).observation.total == 0
            assert app.sessions.active == 2
        await eventually(lambda: app.sessions.active == 0)  # closing gave the sessions back


async def test_timeout_over_http_keeps_the_order() -> None:
    proceed = asyncio.Event()
    number = 0

    async def handler(method: str, path: str, body: bytes) -> Answer:
        nonlocal number
        if path == "/step":
            number += 1
            if number == 1:
                await proceed.wait()
            return 200, {}, result(number)
        return (404 if path == "/schema" else 200), {}, result(0)

    async with answering(handler) as url, CounterEnv(url, transport="http", message_timeout_s=None) as env:
        await env.reset()
        env._session.conversation._timeout_s = 0.2  # type: ignore[union-attr]
        with pytest.raises(RequestTimeoutError):
            await env.step(Add(amount=1))
        with pytest.raises(RequestTimeoutError):
            await env.step(Add(amount=1))
        env._session.conversation._timeout_s = 60  # type: ignore[union-attr]
        proceed.set()
        assert (await env.step(Add(amount=1))).observation.total == 3


async def test_failed_session_is_closed_before_the_next_opens() -> None:
    app = create_app(Counter, Add, Count, max_concurrent_envs=1)
    async with serving(app) as address:
        url = f"http://{address}"
        async with CounterEnv(url, transport="http", max_message_size_mb=0.01) as env:
            await env.reset()
            carrier: Any = env._session.conversation.carrier  # type: ignore[union-attr]  # it is connected
            carrier._max_message_bytes = 10
            with pytest.raises(ProtocolError, match="max_message_size_mb"):
                await env.state()
            assert (await env.reset(seed=2)).observation.total == 2
        assert app.sessions.active == 0


async def test_stateless_server_is_refused() -> None:
    async def handler(method: str, path: str, body: bytes) -> Answer:
        return 200, {}, result(0)

    async with answering(handler) as url:
        async with CounterEnv(url.replace("://", "://me:hush@"), transport="http") as env:
            with pytest.raises(ProtocolError, match="a new environment for each request") as error:
                await env.reset()
            assert not env.connected
        assert "hush" not in str(error.value)


async def test_each_status_raises_its_error() -> None:
    status = 0

    async def handler(method: str, path: str, body: bytes) -> Answer:
        return (200 if path == "/health" else status), {"Retry-After": "7"}, {"detail": "why"}

    expected: list[tuple[int, type[ClientError], str]] = [
        (401, AuthenticationError, "token= in Python, ROPEWALK_TOKEN"),
        (403, AccessRefusedError, "HTTP 403"),
        (307, ConnectionFailedError, "HTTP 307"),
        (404, ConnectionFailedError, "HTTP 404"),
        (422, ValidationFailedError, "why"),
        (500, ExecutionError, "why"),
        (503, CapacityError, "why"),
        (504, SessionError, "why"),
    ]
    async with answering(handler) as url:
        for status, error, expected_text in expected:  # noqa: B007 - read by the server
            async with CounterEnv(url, transport="http", queue_timeout_s=0) as env:
                with pytest.raises(error, match=expected_text) as raised:
                    await env.reset()
                assert type(raised.value) is error
                if isinstance(raised.value, CapacityError):
                    assert raised.value.retry_after_s == 7


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_failed_proxy_request_keeps_the_session(status: int) -> None:
    paths: list[str] = []
    app = create_app(Counter, Add, Count, max_concurrent_envs=1)
    async with serving(app) as address, httpx.AsyncClient(base_url=f"http://{address}") as behind:

        async def proxy(method: str, path: str, body: bytes) -> Answer:
            named = {SESSION_HEADER: "the-one", "Content-Type": "application/json"}
            paths.append(path)
            if paths.count("/step") == 2 and path == "/step":
                return status, {"Retry-After": "3"}, b"<html>no upstream</html>"
            reply = await behind.request(method, path, content=body, headers=named)
            return reply.status_code, {SESSION_HEADER: "the-one"}, reply.content

        async with answering(proxy) as url, CounterEnv(url, transport="http") as env:
            await env.reset(seed=1)
            await env.step(Add(amount=1))
            with pytest.raises(
                ServerError, match=f"HTTP {status}: <html>no upstream.*the session lives"
            ) as raised:
                await env.step(Add(amount=5))
            assert type(raised.value) is ServerError
            assert raised.value.data["retry_after_s"] == 3
            assert (await env.step(Add(amount=2))).observation.total == 4
    assert paths[-1] == "/mcp"  # by which it is closed, once


async def test_missing_or_silent_server_is_a_connection_error() -> None:
    with pytest.raises(ConnectionFailedError, match="check that it runs"):
        await CounterEnv("http://127.0.0.1:9", transport="http").reset()
    finished = asyncio.Event()

    async def handler(method: str, path: str, body: bytes) -> Answer:
        await finished.wait()
        raise AssertionError

    async with answering(handler) as url:
        with pytest.raises(ConnectionFailedError, match=r"no answer within 0.2 s"):
            await CounterEnv(url, transport="http", connect_timeout_s=0.2).connect()


def test_retry_after_is_read_leniently() -> None:
    assert retry_after(None) is None
    assert retry_after("2.5") == 2.5
    assert retry_after("-1") == 0
    assert retry_after("soon") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
