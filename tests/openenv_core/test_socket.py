"""The client's open WebSocket: valid and invalid frames, silence, closing."""

import asyncio
import gc
import json
import select
import warnings
from typing import Any

import pytest
from scripted import scripted
from serving import eventually
from socket_servers import frame, silent_server
from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.typing import Subprotocol

from openenv_core import ConnectionLostError, GenericEnvClient, ProtocolError, RequestTimeoutError


async def test_each_close_code_raises_its_error() -> None:
    code = 0

    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.recv()
        await ws.close(CloseCode(code) if code < 3000 else code, "bye")

    async with scripted(handler) as url:
        for code, expected in ((1001, "going away"), (1012, "going away"), (4001, "4001: bye")):  # noqa: B007
            async with GenericEnvClient(url) as env:
                await env.reset()
                with pytest.raises(ConnectionLostError, match=expected):
                    await env.step({})
                await env.reset()


async def test_message_in_many_frames_is_read() -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            text = frame(3, "ä" * 1000)
            await ws.send([text[:7], text[7:500], "", text[500:]])

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        for _ in range(3):
            assert (await env.reset()).observation["extra"] == "ä" * 1000


@pytest.mark.parametrize("parts", [1, 5])
async def test_message_over_the_size_limit_ends_the_session(parts: int) -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        text = frame(3, "x" * 300_000)
        size = len(text) // parts + 1
        await ws.send([text[n : n + size] for n in range(0, len(text), size)] if parts > 1 else text)
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url, max_message_size_mb=0.2) as env:
        with pytest.raises(ConnectionLostError, match="within max_message_size_mb"):
            await env.reset()


async def test_messages_of_many_megabytes_pass_both_ways() -> None:
    size = 10_000_000

    async def handler(ws: ServerConnection) -> None:
        async for message in ws:
            await ws.send(frame(len(message), "y" * size))

    async with scripted(handler, max_size=None) as url, GenericEnvClient(url) as env:
        observation = (await env.step({"text": "z" * size})).observation
        assert observation["total"] > size
        assert len(observation["extra"]) == size


async def test_invalid_frames_end_the_session() -> None:
    """A continuation of nothing, a reserved opcode, a message within another."""
    frames = b""

    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        ws.transport.write(frames)
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        for frames in (b"\x80\x02{}", b"\x83\x02{}", b"\x01\x01{\x81\x02{}"):  # noqa: B007
            with pytest.raises(ConnectionLostError):
                await env.reset()


# Pings


async def test_vanished_server_is_detected_by_pings_and_not_waited_for_by_a_close() -> None:
    async with silent_server() as url:
        options = {"websocket_ping_interval_s": 0.1, "websocket_ping_timeout_s": 0.2}
        async with GenericEnvClient(url, message_timeout_s=None, **options) as env:
            with pytest.raises(ConnectionLostError, match=r"answer a ping within 0.2 s"):
                await env.reset()
        other = GenericEnvClient(url, connect_timeout_s=0.5)
        await other.connect()
        async with asyncio.timeout(30):
            await other.close()


@pytest.mark.soak
async def test_incoming_message_keeps_the_connection_past_the_ping_timeout() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        text = frame(7, "x" * 500_000).encode()
        head = bytes([0x81, 127]) + len(text).to_bytes(8, "big")
        ws.transport.pause_reading()  # its answers to pings come behind the message
        pieces = [head, *(text[n : n + 5_000] for n in range(0, len(text), 5_000))]
        for piece in pieces:
            ws.transport.write(piece)
            await asyncio.sleep(0.02)
        ws.transport.resume_reading()
        await ws.wait_closed()

    options = {"websocket_ping_interval_s": 0.1, "websocket_ping_timeout_s": 0.3}
    async with scripted(handler) as url, GenericEnvClient(url, **options) as env:
        assert (await env.reset()).observation["total"] == 7


async def test_unread_pong_of_a_busy_thread_counts(counter_url: str) -> None:
    async with GenericEnvClient(counter_url) as env:
        await env.reset()
        carrier: Any = env._session.conversation.carrier  # type: ignore[union-attr]  # it is connected
        transport, pinged_at = carrier._transport, carrier._loop.time()
        transport.send_ping()
        raw = carrier._transport.underlying_transport.get_extra_info("socket")
        # This loop reads nothing meanwhile, as that of a trainer at work.
        poll = select.poll()
        poll.register(raw.fileno(), select.POLLIN)
        assert poll.poll(30_000)
        assert carrier._is_receiving(transport, pinged_at)  # as a loop asks that looks at its timers first


# Who does not read, who says too much, who does not end


async def test_unread_requests_pause_the_writer() -> None:
    async with silent_server() as url:
        env = GenericEnvClient(url, message_timeout_s=0.1)
        for _ in range(6):
            with pytest.raises(RequestTimeoutError):
                await env.step({"text": "z" * 8_000_000})
        carrier = env._session.conversation.carrier
        assert carrier.write_paused
        # One frame is taken in beyond what the system's buffers hold, and no more.
        assert carrier._transport.underlying_transport.get_write_buffer_size() < 17_000_000  # type: ignore[attr-defined]
    await env.close()


async def test_unsolicited_message_is_a_protocol_error() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.send(frame(666))
        await ws.recv()
        await ws.send(frame(2))
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        assert (await env.reset()).observation["total"] == 1
        conversation: Any = env._session.conversation
        await eventually(lambda: conversation.error)
        with pytest.raises(ProtocolError, match=r"666.* unasked"):
            await env.step({})
        with pytest.raises(ConnectionLostError, match="unasked"):
            await env.step({})
        assert (await env.reset()).observation["total"] == 1


async def test_aborted_session_is_closed_despite_an_unread_reply() -> None:
    """A server may write before it reads: a socket closed with unread data would reset the connection."""
    code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.recv()
        ws.transport.pause_reading()
        reply = Frame(Opcode.TEXT, frame(2).encode()).serialize(mask=False)
        ws.transport.write(reply)
        env._session.conversation.carrier.abort()  # type: ignore[union-attr] # it is connected
        await asyncio.sleep(0.05)
        ws.transport.write(reply)
        ws.transport.resume_reading()
        await ws.wait_closed()
        code.set_result(ws.close_code)

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        await env.reset()
        with pytest.raises(ConnectionLostError, match="by this client"):
            await env.step({})
        await env.close()
        assert await code == CloseCode.NORMAL_CLOSURE


async def test_closing_ends_a_session_that_is_being_resumed() -> None:
    """Otherwise the server would keep it for its lease."""
    resuming, code = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def handler(ws: ServerConnection) -> None:
        request = json.loads(await ws.recv())
        if request["op"] == "open":
            await ws.send(json.dumps({"id": request["id"], "session": "s", "members": [0], "last": True}))
            ws.transport.abort()
        else:
            resuming.set()
            await ws.wait_closed()
            code.set_result(ws.close_code)

    async with scripted(handler, subprotocols=[Subprotocol("ropewalk.v1")]) as url:
        env = GenericEnvClient(url)
        request = asyncio.create_task(env.reset())
        await asyncio.wait_for(resuming.wait(), 30)
        await env.close()
        with pytest.raises(ConnectionLostError, match="by this client"):
            await request
        assert await asyncio.wait_for(code, 30) == CloseCode.NORMAL_CLOSURE


def test_connection_that_is_broken_off_as_its_loop_ends_is_closed(counter_url: str) -> None:
    async def main() -> None:
        env = GenericEnvClient(counter_url)
        await env.reset()
        carrier: Any = env._session.conversation.carrier  # type: ignore[union-attr] # it is connected
        carrier._transport.underlying_transport.pause_reading()  # as if the server did not confirm
        carrier.abort()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


@pytest.mark.soak
async def test_invalid_reply_is_reported_at_once_even_if_the_server_hangs() -> None:
    finished = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send("garbage")
        ws.transport.pause_reading()  # no closing handshake is answered
        await finished.wait()

    async with scripted(handler) as url:
        env = GenericEnvClient(url, connect_timeout_s=3600)
        with pytest.raises(ProtocolError, match="garbage"):
            async with asyncio.timeout(60):
                await env.reset()
        async with asyncio.timeout(60):
            await env.close()
        finished.set()
