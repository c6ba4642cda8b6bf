"""The client against servers that answer anything at any time: typed errors, no hang, no misassigned reply."""

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from fuzzing import EXAMPLES, dice
from fuzzwire import BINARY, CLOSE, CONTINUATION, PING, frame
from scripted import scripted
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from openenv_core import GenericEnvClient
from openenv_core.errors import ClientError, ExecutionError, RequestTimeoutError, ValidationFailedError

WAIT_TIMEOUT_S = 60


# Anything for an answer

CODES = ("VALIDATION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR", "EXECUTION_ERROR", "?")
NAMES = ("observation", "reward", "done", "metadata", "message", "errors", "max_sessions", "retry_after_s")
VALUES: list[Any] = [None, True, 0, -1, 1e308, "", "x", [], [1], {}, {"a": 1}, [[{}]], "\u2028", 10**40]


def answer(rng: random.Random) -> bytes:
    """Return a random payload of a reply, valid or not; test_protocol_any has more."""
    kind, value = rng.choice(("observation", "state", "mcp", "error", "error", 1, None)), rng.choice(VALUES)
    data = {name: rng.choice(VALUES) for name in NAMES} | {"code": rng.choice((*CODES, value))}
    reply = json.dumps(rng.choice(({"type": kind, "data": data}, {"type": kind, "data": value}, value)))
    endless = b'{"type":"state","data":' * rng.choice((1, 500))
    return rng.choice((reply.encode(), reply.encode(), endless, rng.randbytes(rng.randrange(60))))


def packet(rng: random.Random) -> bytes:
    """Return random bytes that a server sends instead of a reply."""
    payload = answer(rng)
    match rng.randrange(10):
        case 0:
            cut = rng.randrange(len(payload) + 1)
            return (
                frame(payload[:cut], fin=False, masked=False)
                + frame(b"p", PING, masked=False)
                + frame(payload[cut:], CONTINUATION, masked=False)
            )
        case 1:
            return frame(payload, BINARY, masked=False)
        case 2:
            return frame(
                payload, rng.randrange(16), fin=rng.random() < 0.5, reserved=rng.randrange(8), masked=False
            )
        case 3:
            return frame(rng.randbytes(2) + b"bye", CLOSE, masked=False)
        case 4:
            return frame(payload, masked=False, declared=rng.choice((1 << 40, (1 << 63) - 1)), length_bytes=8)
        case 5:
            return frame(payload, masked=True)
        case 6:
            return rng.randbytes(rng.randrange(1, 40))
        case _:
            return frame(payload, masked=False)


@pytest.mark.parametrize("number", range(2))
async def test_any_socket_reply_is_a_result_or_a_typed_error(number: int) -> None:
    rng = dice(number)

    async def handler(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            async for _ in connection:
                connection.transport.write(packet(rng))
                if rng.random() < 0.1:
                    connection.transport.abort()

    async with (
        asyncio.timeout(6 * WAIT_TIMEOUT_S),
        scripted(handler) as url,
        GenericEnvClient(url, message_timeout_s=0.05, connect_timeout_s=WAIT_TIMEOUT_S) as client,
    ):
        for _ in range(10 * EXAMPLES):
            ask = rng.choice((client.reset, client.state, lambda: client.step({"a": 1})))
            with suppress(ClientError):
                await ask()


@pytest.mark.parametrize("number", range(2))
async def test_any_http_response_is_a_result_or_a_typed_error(number: int) -> None:
    rng = dice(number)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            complete = True
            while complete and rng.random() > 0.1:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"content-length:" in head.lower():
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    await reader.readexactly(length)
                healthy = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True
                text, complete = healthy if b"/health" in head else http_response(rng)
                writer.write(text)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(6 * WAIT_TIMEOUT_S):
        client = GenericEnvClient(
            url, transport="http", message_timeout_s=0.05, connect_timeout_s=WAIT_TIMEOUT_S
        )
        async with client:
            for _ in range(5 * EXAMPLES):
                ask = rng.choice((client.reset, client.state, lambda: client.step({"a": 1})))
                with suppress(ClientError):
                    await ask()


def http_response(rng: random.Random) -> tuple[bytes, bool]:
    """Return a random HTTP response, and whether it is complete."""
    if rng.random() < 0.1:
        return rng.randbytes(30), False
    body = answer(rng)
    status = rng.choice((200, 200, 200, 204, 301, 400, 401, 404, 418, 422, 429, 500, 503, 504, 599))
    headers = [b"Content-Type: application/json", b"X-OpenEnv-Session: s"]
    if rng.random() < 0.3:
        waits = (b"1", b"-1", b"soon", b"1e400", b"nan", b"Wed, 99 Foo")
        headers.append(b"Retry-After: " + rng.choice(waits))
    if rng.random() < 0.1:
        headers.append(b"Content-Encoding: " + rng.choice((b"gzip", b"br", b"x")))
    if rng.random() < 0.1:
        headers.append(b"Location: " + rng.choice((b"//", b"http://[", b"/again")))
    excess = rng.choice((0, 0, 0, 0, 0, -1, 5))
    headers.append(b"Content-Length: %d" % max(0, len(body) + excess))
    text = b"HTTP/1.1 %d X\r\n" % status + b"\r\n".join(headers) + b"\r\n\r\n" + body
    return text, excess == 0 and status != 204


# Whose reply it is


class Numbered:
    """A server that answers in order with random delays and names the request in each reply."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.request_count = 0

    async def __call__(self, connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            async for message in connection:
                request = json.loads(message)
                if request["type"] == "close":
                    return
                self.request_count += 1
                if self._rng.random() < 0.4:
                    await asyncio.sleep(self._rng.random() * 0.04)
                await connection.send(self._reply(request))

    def _reply(self, request: Any) -> str:
        if request["type"] == "state":
            return json.dumps({"type": "state", "data": {"number": self.request_count}})
        mark = (request.get("data") or {}).get("mark")
        if self._rng.random() < 0.2:
            code = self._rng.choice(("EXECUTION_ERROR", "VALIDATION_ERROR"))
            return json.dumps({"type": "error", "data": {"code": code, "message": str(mark)}})
        data = {"observation": {"mark": mark}, "reward": None, "done": False}
        return json.dumps({"type": "observation", "data": data})


@pytest.mark.parametrize("number", range(2))
async def test_no_schedule_of_timeouts_and_cancellations_misassigns_a_reply(number: int) -> None:
    rng = dice(number)
    server = Numbered(dice(number + 1000))
    matches: list[int] = []

    async def caller(client: GenericEnvClient, name: int) -> None:
        for turn in range(6 * EXAMPLES):
            mark = name * 100_000 + turn
            work: Any = None
            match rng.randrange(3):
                case 0:
                    work = client.reset(mark=mark)
                case 1:
                    work = client.step({"mark": mark})
                case _:
                    work = client.state()
            timeout_s = rng.choice((None, None, rng.random() * 0.03))
            try:
                result = await asyncio.wait_for(work, timeout_s)
            except (RequestTimeoutError, TimeoutError):
                continue
            except (ExecutionError, ValidationFailedError) as error:
                matches.append(int(error.message) == mark)
                continue
            if isinstance(result, dict):
                matches.append(result["number"] <= server.request_count)
            else:
                matches.append(result.observation["mark"] == mark)

    async with (
        asyncio.timeout(6 * WAIT_TIMEOUT_S),
        scripted(server) as url,
        GenericEnvClient(url, message_timeout_s=0.02, connect_timeout_s=WAIT_TIMEOUT_S) as client,
    ):
        await asyncio.gather(*(caller(client, name) for name in range(3)))
        assert client.connected
        assert matches
        assert all(matches)
        # Once it is quiet the session is in order: the reply is that of the last request.
        state: Any = None
        while state is None:
            with suppress(RequestTimeoutError):
                state = await client.state()
        assert state["number"] == server.request_count
