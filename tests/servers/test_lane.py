"""The fast path for whole frames: in any fragmentation, the application receives the same messages."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzwire import BINARY, CLOSE, HANDSHAKE, PING, PONG, TEXT, frame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import WAIT_TIMEOUT_S, eventually
from serving import serving as served
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.protocol import State

from servers import protocols as lane
from servers.protocols import HttpProtocol, SocketProtocol, _Writer
from servers.routes.connection import FAST_PATH_EXTENSION

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

PAUSE_S = 0.1
"""Long enough for the server, which runs in this very loop, to have taken what was sent so far."""


class Echo:
    """Echoes every message."""

    protocol: SocketProtocol

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self.protocol = scope["extensions"][FAST_PATH_EXTENSION]
        while (message := await receive())["type"] == "websocket.receive":
            self.heard.append(message.get("text"))
            await send({**message, "type": "websocket.send"})


serving: Any = partial(served, lifespan="off")


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(HANDSHAKE % b"/ws")
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head
        yield reader, writer
    finally:
        writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        first, size = await reader.readexactly(2)
        if size == 126:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await reader.readexactly(8))
        return first & 0xF, await reader.readexactly(size)


async def test_frames_of_any_size_are_echoed() -> None:
    async with serving(Echo()) as address, opened(address) as (reader, writer):
        for size in (0, 1, 125, 126, 127, 65_535, 65_536, 300_001):
            text = ("é" * size)[:size]
            for _ in range(2):
                writer.write(frame(text.encode()))
                assert await read_frame(reader) == (TEXT, text.encode())


async def test_many_frames_in_one_read_yield_to_other_tasks() -> None:
    heard_before: list[int] = []

    class Witness(Echo):
        async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            async def recorded_receive() -> MutableMapping[str, Any]:
                if len(self.heard) == 1:
                    asyncio.get_running_loop().call_soon(lambda: heard_before.append(len(self.heard)))
                return await receive()

            await super().__call__(scope, recorded_receive, send)

    async with serving(Witness()) as address, opened(address) as (reader, writer):
        writer.write(frame(b"all at once") * 1000)
        for _ in range(1000):
            assert await read_frame(reader) == (TEXT, b"all at once")
    assert heard_before[0] <= lane._EVENTS_PER_YIELD


@pytest.mark.parametrize("kind", [PING, PONG])
async def test_flood_of_control_frames_ends_the_connection(kind: int) -> None:
    async with serving(Echo()) as address:
        async with opened(address) as (reader, writer):
            writer.write(frame(b"", kind) * lane.MAX_CONTROL_FRAMES + frame(b"still here"))
            while (reply := await read_frame(reader)) == (PONG, b""):
                pass
            assert reply == (TEXT, b"still here")
        async with opened(address) as (reader, writer):
            writer.write(frame(b"", kind) * (lane.MAX_CONTROL_FRAMES + 1) + frame(b"too much"))
            with suppress(ConnectionError):
                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    assert b"too much" not in await reader.read()


async def test_only_the_latest_pong_is_kept_for_a_client_that_does_not_read() -> None:
    echo = Echo()
    async with serving(echo) as address, opened(address) as (reader, writer):
        writer.write(frame(b"a"))
        assert await read_frame(reader) == (TEXT, b"a")
        echo.protocol.pause_writing()
        for pings in (frame(b"1", PING), frame(b"2", PING), frame(b"3", PING) + frame(b"4", PING)):
            writer.write(pings)
            await asyncio.sleep(PAUSE_S)
        echo.protocol.resume_writing()
        writer.write(frame(b"b"))
        assert [await read_frame(reader) for _ in range(3)] == [(PONG, b"3"), (PONG, b"4"), (TEXT, b"b")]


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["text", "text", "text", "binary", "ping", "fragments"]),
        st.binary(max_size=200).map(lambda b: b.hex().encode()),
        st.integers(min_value=0, max_value=3),
    ),
    min_size=1,
    max_size=12,
)


def wire(kind: str, payload: bytes, pieces: int) -> Iterator[bytes]:
    if kind == "fragments":
        at = [len(payload) * i // (pieces + 2) for i in range(pieces + 3)]
        parts = [payload[a:b] for a, b in pairwise(at)]
        for i, part in enumerate(parts):
            yield frame(part, 0 if i else TEXT, fin=i == len(parts) - 1)
            if i == 0:
                yield frame(b"in between", PING)
    else:
        yield frame(payload[:120], {"text": TEXT, "binary": BINARY, "ping": PING}[kind])


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    messages=MESSAGES, cuts=st.lists(st.integers(min_value=1, max_value=60), max_size=30), gap=st.booleans()
)
def test_messages_in_any_fragmentation_are_answered_in_order(
    messages: list[tuple[str, bytes, int]], cuts: list[int], gap: bool
) -> None:
    asyncio.run(_conversation(messages, cuts, gap))


async def _conversation(messages: list[tuple[str, bytes, int]], cuts: list[int], gap: bool) -> None:
    expected = []
    for kind, payload, _ in messages:
        if kind == "fragments":
            expected.append((TEXT, payload))
        elif kind != "ping":
            expected.append((TEXT if kind == "text" else BINARY, payload[:120]))
    data = b"".join(piece for message in messages for piece in wire(*message))
    async with serving(Echo()) as address, opened(address) as (reader, writer):
        for cut in cuts:
            writer.write(data[:cut])
            data = data[cut:]
            await writer.drain()
            if gap:
                await asyncio.sleep(0)
        writer.write(data)
        got = []
        while len(got) < len(expected):
            opcode, payload = await read_frame(reader)
            if opcode != PONG:
                got.append((opcode, payload))
        assert got == expected


async def test_sending_on_a_closed_connection_raises_client_disconnected() -> None:
    protocols: list[SocketProtocol] = []
    raised: list[Exception] = []

    class Recorded(SocketProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            protocols.append(self)

    async def late(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        while not protocols[0].close_sent:  # noqa: ASYNC110 - the very turn of the loop counts
            await asyncio.sleep(0)
        try:
            await send({"type": "websocket.send", "text": "late"})
        except Exception as error:
            raised.append(error)

    async with serving(late, ws=Recorded) as address, opened(address) as (reader, writer):
        writer.write(frame(b"one"))
        await asyncio.sleep(PAUSE_S)
        writer.write(frame(b"reserved", 0x3))
        opcode, payload = await read_frame(reader)
        assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1002))
        await eventually(lambda: raised)
    assert [type(error) for error in raised] == [ClientDisconnected]


async def test_invalid_text_before_a_close_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with serving(Echo()) as address, opened(address) as (reader, writer):
        writer.write(frame(b"\xff") + frame(struct.pack("!H", 1000), CLOSE))
        assert (await read_frame(reader))[0] == CLOSE
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            assert await reader.read() == b""
    assert faults == []
    assert not [record for record in caplog.records if record.exc_info]


async def test_frames_after_a_close_are_ignored() -> None:
    echo = Echo()
    async with serving(echo) as address, opened(address) as (reader, writer):
        writer.write(frame(struct.pack("!H", 1000), CLOSE) + frame(b"late"))
        await writer.drain()
        writer.write(frame(b"later"))
        assert (await read_frame(reader))[0] == CLOSE
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            assert await reader.read() == b""
    assert echo.heard == []


async def test_payload_that_looks_like_a_frame_is_payload() -> None:
    looks = frame(b"inner")
    async with serving(Echo()) as address, opened(address) as (reader, writer):
        # In the second the head is all that came before, so nothing of it waits in a buffer.
        for inner in (b"ab" + looks, looks):
            outer = struct.pack("!BBI", 0x82, 0x80 | len(inner), 0) + inner  # masked with zeros
            writer.write(outer[: -len(looks)])
            await asyncio.sleep(PAUSE_S)
            writer.write(looks)
            assert await read_frame(reader) == (BINARY, inner)


async def test_uvicorn_has_what_the_protocols_override() -> None:
    """`pyproject.toml` pins uvicorn, whose protocols are undocumented; a new release has to pass this."""
    for ours, theirs in ((SocketProtocol, WebSocketsSansIOProtocol), (HttpProtocol, H11Protocol)):
        base = theirs(Config(None), ServerState(), {})
        for name, method in vars(theirs).items():
            if callable(method) and not name.startswith("_"):
                assert [*signature(getattr(ours, name)).parameters] == [*signature(method).parameters], name
        assert isinstance(base, asyncio.Protocol)
    socket = WebSocketsSansIOProtocol(Config(None), ServerState(), {})
    for name in ("queue", "conn", "frames", "writable", "handshake_initiated", "handshake_complete"):
        assert hasattr(socket, name)
    assert {socket.close_sent, socket.disconnected} == {False}
    assert (socket.conn.state, [*socket.conn.extensions]) == (State.CONNECTING, [])
    hooks = {
        *("handle_connect", "handle_cont", "handle_ping", "handle_pong", "send_receive_event_to_app"),
        *("data_received", "connection_made", "connection_lost", "pause_writing", "resume_writing", "send"),
    }
    assert hooks <= vars(WebSocketsSansIOProtocol).keys() & dir_of(SocketProtocol)
    assert "handle_websocket_upgrade" in vars(H11Protocol)


def dir_of(kind: type) -> set[str]:
    """The names that a class of ours defines itself or by its mix-in."""
    return {name for one in kind.__mro__ if one.__module__ == lane.__name__ for name in vars(one)}


async def test_message_within_an_unfinished_one_ends_the_connection() -> None:
    echo = Echo()
    async with serving(echo) as address:
        for unfinished in ([(TEXT, b"a")], [(TEXT, b"a"), (0, b"b")], [(TEXT, b""), (0, b"")]):
            async with opened(address) as (reader, writer):
                for opcode, payload in unfinished:
                    writer.write(frame(payload, opcode, fin=False))
                    await asyncio.sleep(PAUSE_S)
                writer.write(frame(b"whole"))
                opcode, payload = await read_frame(reader)
                assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1002))
    assert echo.heard == []


async def test_unread_replies_pause_the_reading() -> None:
    """Unread replies are bounded: the application's send waits, and so does reading."""
    echo = Echo()
    async with serving(echo) as address, opened(address) as (reader, writer):
        payload = b"x" * 1_000_000
        sending = asyncio.create_task(_send(writer, frame(payload), times=64))
        await asyncio.sleep(PAUSE_S * 5)
        assert not sending.done()
        assert len(echo.heard) < 32
        for _ in range(64):
            assert await read_frame(reader) == (TEXT, payload)
        await sending


async def _send(writer: asyncio.StreamWriter, data: bytes, times: int) -> None:
    for _ in range(times):
        writer.write(data)
        await writer.drain()


async def test_frames_that_a_connection_takes_do_not_reach_receive() -> None:
    """All other frames reach `receive`, in order."""
    received: list[Any] = []
    connection = SimpleNamespace(is_sending=False, paused=None, closing=False)

    async def half(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        protocol = scope["extensions"][FAST_PATH_EXTENSION]
        connection.on_frame = lambda frame: protocol.send_frame(frame.upper())
        protocol.connection = connection
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message.get("text") or message.get("bytes"))
            await send({**message, "type": "websocket.send"})

    async with serving(half) as address, opened(address) as (reader, writer):
        for opcode, sent, back, busy in (
            (TEXT, b"now", b"NOW", {}),
            (TEXT, b"later", b"later", {"is_sending": True}),
            (BINARY, b"now", b"now", {"paused": True}),
            (TEXT, b"last", b"last", {"closing": True}),
            (BINARY, b"soon", b"SOON", {}),
            (TEXT, b"now" * 100, b"NOW" * 100, {}),
        ):
            await asyncio.sleep(PAUSE_S)  # until the application waits for it
            vars(connection).update({"is_sending": False, "paused": None, "closing": False} | busy)
            writer.write(frame(sent, opcode))
            assert await read_frame(reader) == (opcode, back)
        writer.write(frame(b"now, twice") * 2)  # more than one frame at once goes the general way
        assert [await read_frame(reader) for _ in range(2)] == [(TEXT, b"now, twice")] * 2
    assert received == ["later", b"now", "last", "now, twice", "now, twice"]


async def test_writes_of_one_loop_turn_are_sent_together() -> None:
    log: list[tuple[str, object]] = []

    class Transport(asyncio.Transport):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.closed = name, False

        def write(self, data: Any) -> None:
            log.append((self.name, bytes(data)))

        def is_closing(self) -> bool:
            return self.closed

        def close(self) -> None:
            log.append((self.name, "closed"))

    first, gone = Transport("one"), Transport("three")
    one, two, three = _Writer(first), _Writer(Transport("two")), _Writer(gone)
    for writer, data in ((one, b"a"), (two, b"b"), (three, b"c"), (one, b"d")):
        writer.write(data)
    gone.closed = True
    assert not log
    await asyncio.sleep(0)
    assert log == [("one", b"ad"), ("two", b"b")]
    one.write(b"x" * 100_000)  # so much is not held back
    assert len(log) == 3
    two.write(b"last")
    two.close()
    await asyncio.sleep(0)
    assert log[3:] == [("two", b"last"), ("two", "closed")]
