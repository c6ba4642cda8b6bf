"""Limits on the size and duration of requests, on a real `ropewalk serve`."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import counter
import httpx
import psutil
import pytest
from fuzzwire import HANDSHAKE, frame
from serve_process import ServeProcess, eventually, serve
from server_apps import app_of
from serving import ask, http_client, serving, socket_to
from serving import eventually as eventually_so
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.extensions.permessage_deflate import ClientPerMessageDeflateFactory
from websockets.typing import Origin

from servers.protocols import HttpProtocol, SocketProtocol

MB = 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serve("--max-body", str(MB)) as running:
        yield running


def read_all(connection: socket.socket) -> bytes:
    """Read to the end of the connection, or to its reset."""
    got = b""
    try:
        while part := connection.recv(65_536):
            got += part
    except ConnectionError:
        pass
    return got


@asynccontextmanager
async def sent(
    address: str, *data: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send bytes over a connection."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.writelines(data)
    try:
        yield reader, writer
    finally:
        writer.close()


def test_large_body_is_refused_by_its_length_alone(server: ServeProcess) -> None:
    for length in ("52428800", "-1", "1e3", "0x10", "1" * 5000, "+5"):
        with server.connect() as connection:
            connection.sendall(
                f"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            response = connection.recv(65_536)  # not a byte of the body was sent
            assert response.split()[1] in ((b"413",) if length == "52428800" else (b"400", b"413")), length
            assert b"connection: close" in response.lower()


def test_body_of_fifty_megabytes_is_refused_without_using_memory(server: ServeProcess) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    body = (b" " * MB for _ in range(50))  # its length is not told
    response = httpx.post(f"http://{server.address}/step", content=body, timeout=30)
    assert response.status_code == 413
    assert "ROPEWALK_MAX_BODY_BYTES" in response.json()["detail"]
    assert psutil.Process(server.process.pid).memory_info().rss - before < 8 * MB
    assert server.get("/health")[0] == 200


def test_compressed_bodies_are_refused(server: ServeProcess) -> None:
    for encoding, status in (
        ("gzip", 415),
        ("deflate", 415),
        ("br", 415),
        ("identity, gzip", 415),
        ("identity", 200),
    ):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        response = httpx.post(f"http://{server.address}/reset", content=b'{"seed": 3}', headers=headers)
        assert response.status_code == status, encoding


async def test_chunked_body_is_counted() -> None:
    async with serving(app_of(counter.Counter, max_body_bytes=1000)) as address:
        for pieces, status in ((9, 200), (11, 413)):
            async with sent(
                address,
                b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
                b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
                (b"64\r\n" + b" " * 100 + b"\r\n") * pieces + b"0\r\n\r\n",
            ) as (reader, _):
                line = await asyncio.wait_for(reader.readline(), 60)
                assert line.split()[1] == str(status).encode(), pieces


async def test_body_must_arrive_in_time() -> None:
    request = b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    async with (
        serving(app_of(counter.Counter, body_timeout_s=0.2)) as address,
        sent(address, request) as (reader, _),
    ):
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 408 ")


class Hasty(HttpProtocol):
    head_timeout_s = 0.2
    unread_timeout_s = 0.2


class HastySocket(SocketProtocol):
    unread_timeout_s = 0.2


async def test_incomplete_or_trickling_headers_end_the_connection() -> None:
    async def half_sent(address: str, half: bytes) -> None:
        async with sent(address, half) as (reader, _):
            await asyncio.wait_for(reader.read(), 60)  # which ends, because the connection does

    async def trickling(address: str) -> None:
        async with sent(address) as (_, writer):
            with pytest.raises(ConnectionError):
                await trickle(writer, b"G")

    complete_request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    halves = (
        b"",
        b"G",
        complete_request[:-2] + b"X-Half: ",
        complete_request + b"GET /health HTTP/1.1\r\nX-Half: ",
    )
    async with serving(app_of(counter.Counter), http=Hasty, timeout_keep_alive=1) as address:
        await asyncio.gather(trickling(address), *(half_sent(address, half) for half in halves))


@pytest.mark.slow
async def test_body_trickling_after_its_refusal_ends_the_connection() -> None:
    # Nobody reads a body on this route.
    request = b"POST /no/such/route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    async with (
        serving(app_of(counter.Counter, body_timeout_s=1), timeout_keep_alive=1) as address,
        sent(address, request) as (_, writer),
    ):
        with pytest.raises(ConnectionError):
            await trickle(writer, b"x")


def test_endless_headers_are_refused(server: ServeProcess) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * MB)
        except ConnectionError:
            return
        answer = read_all(connection)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")


def test_handshake_with_too_long_headers_is_answered_with_431(server: ServeProcess) -> None:
    with server.connect() as connection:
        connection.sendall(
            HANDSHAKE.removesuffix(b"\r\n") % b"/ws" + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n"
        )
        assert read_all(connection).split()[1] == b"431"


@pytest.mark.parametrize("request_bytes", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", HANDSHAKE % b"/"])
async def test_unread_response_or_message_ends_the_connection(
    request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servers.protocols.PEER_GONE_AFTER_S", 600.0)  # the kernel would end it too

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(16 * MB)})
        else:
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "bytes": bytes(16 * MB)})
            await receive()

    async with serving(app, http=Hasty, ws=HastySocket, lifespan="off") as address:  # type: ignore[arg-type]
        host, port = address.split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(request_bytes)
            await until_dropped(client)


async def trickle(writer: asyncio.StreamWriter, part: bytes) -> None:
    async with asyncio.timeout(60):
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)


async def until_dropped(client: socket.socket) -> None:
    """Wait until the server has dropped a client that does not read."""
    here = client.getsockname()
    me = psutil.Process(os.getpid())

    def is_connected() -> bool:
        return any(connection.raddr == here for connection in me.net_connections("tcp"))

    await eventually_so(is_connected)
    await eventually_so(lambda: not is_connected())


async def test_messages_up_to_16_mib_pass_and_a_longer_one_closes_the_socket(server: ServeProcess) -> None:
    async with socket_to(server.address) as client:
        frame = {"type": "step", "data": {"amount": 1, "metadata": {"pad": "x" * (15 * MB)}}}
        assert (await ask(client, frame))["type"] == "observation"
        with suppress(ConnectionClosed):  # already while it sends
            await client.send("x" * (16 * MB + 1))
        await asyncio.wait_for(client.wait_closed(), 60)
        assert client.close_code == 1009


async def test_compression_is_not_negotiated(server: ServeProcess) -> None:
    """14 kB of compressed frames can be 15 MB; nothing is inflated here."""
    offer = [ClientPerMessageDeflateFactory(compress_settings={"memLevel": 4})]
    async with connect(f"ws://{server.address}/ws", extensions=offer, compression=None, proxy=None) as client:
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers
        assert client.protocol.extensions == []


async def test_refused_and_invalid_sockets_log_nothing(server: ServeProcess) -> None:
    elsewhere = Origin("http://elsewhere.example")
    with pytest.raises(InvalidStatus):
        async with connect(f"ws://{server.address}/ws", origin=elsewhere, proxy=None):
            raise AssertionError("expected a refusal")
    with server.connect() as connection:
        connection.sendall(HANDSHAKE % b"/ws")
        connection.recv(4096)
        connection.sendall(frame(b"\xff\xfe"))
        assert struct.pack("!H", 1007) in read_all(connection)
    eventually(lambda: server.get("/health")[0] == 200)
    for word in ("Traceback", "UTF-8", "handshake"):
        assert word not in server.output


async def test_connection_over_the_limit_gets_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.protocols.connection_limit", lambda: 1)
    async with (
        serving(app_of(counter.Counter)) as address,
        http_client(address) as client,
    ):
        async with socket_to(address) as first:
            await ask(first, {"type": "state"})
            refused = await client.get("/health")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "try again later" in refused.json()["detail"]
        async with asyncio.timeout(60):
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_connections_set_nodelay_and_user_timeout() -> None:
    """A response's head and body are two writes: with Nagle's algorithm the second waits some 40 ms for the client.

    That a machine that has gone is noticed by what it leaves unacknowledged, which the option asks for, takes a
    network that can be cut to see.
    """
    options = []

    class Recorded(HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            socket_options = (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT)
            options.extend(connection.getsockopt(socket.IPPROTO_TCP, option) for option in socket_options)

    async with serving(counter.app, http=Recorded) as address, httpx.AsyncClient() as client:
        assert (await client.get(f"http://{address}/health")).json() == {"status": "healthy"}
    assert options[:2] == [1, 40_000]
