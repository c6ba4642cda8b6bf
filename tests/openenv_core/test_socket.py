import asyncio
import json
import os
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from counter import Add, Count, Counter
from scripted import scripted
from serving import eventually, serving
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Opcode

from openenv_core import (
    AccessRefused,
    AuthenticationFailed,
    CapacityReached,
    ClientError,
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    GenericEnvClient,
    ProtocolError,
    RequestTimeout,
)
from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.socket import open_socket
from openenv_core.client.turns import Turn
from openenv_core.proxies import proxy_for
from servers import create_app


def frame(total: int, filler: str = "") -> str:
    data = {"observation": {"total": total, "extra": filler}, "reward": None, "done": False}
    return json.dumps({"type": "observation", "data": data})


def refusing(status: int, **headers: str) -> Callable[[ServerConnection, Request], Response]:
    def process_request(connection: ServerConnection, request: Request) -> Response:
        fields = Headers({name.replace("_", "-"): value for name, value in headers.items()})
        fields["Content-Length"] = "3"
        return Response(status, HTTPStatus(status).phrase, fields, b"why")

    return process_request


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, AuthenticationFailed, "pass token="),
        (403, AccessRefused, "origin"),
        (421, AccessRefused, "host name"),
        (404, ConnectionFailed, 'transport="http"'),
        (500, ConnectionFailed, "HTTP 500: why"),
        (503, CapacityReached, "why"),
        (429, CapacityReached, "why"),
    ],
)
async def test_why_a_handshake_was_refused(status: int, error: type[ClientError], words: str) -> None:
    async def handler(ws: ServerConnection) -> None:
        raise AssertionError

    process = refusing(status, Retry_After="3")
    async with serve(handler, "127.0.0.1", 0, process_request=process) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        env = GenericEnvClient(f"http://127.0.0.1:{port}")
        with pytest.raises(error, match=words) as raised:
            await env.connect()
        assert type(raised.value) is error
        if isinstance(raised.value, CapacityReached):
            assert raised.value.retry_after_s == 3
        await env.close()


async def test_headers_and_tokens_arrive() -> None:
    seen: list[Any] = []

    async def handler(ws: ServerConnection) -> None:
        assert ws.request is not None
        seen.append((ws.request.path, dict(ws.request.headers.raw_items())))
        async for _ in ws:
            await ws.send(frame(1))

    async with scripted(handler) as url:
        async with GenericEnvClient(url, headers={"X-Where": "here"}, token="t0") as env:
            await env.reset()
            async with await env.new_session() as other:
                await other.reset()
        host = url.removeprefix("http://")
        async with GenericEnvClient(f"ws://me:p%40ss@{host}/base/ws?a=b", session_id="s-1") as env:
            await env.reset()
    for path, headers in seen[:2]:
        assert (path, headers["X-Where"], headers["Authorization"]) == ("/ws", "here", "Bearer t0")
    path, headers = seen[2]
    assert path == "/base/ws?a=b&session_id=s-1"
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert headers["Host"] == host


async def test_redirects_stay_on_the_host() -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(frame(2))

    def process(connection: ServerConnection, request: Request) -> Response | None:
        places = {"/here/ws": "/there/ws", "/away/ws": "http://127.0.0.2:1/ws", "/round/ws": "/round/ws"}
        place = places.get(request.path)
        return place and refusing(307, Location=place)(connection, request)  # type: ignore[return-value]

    async with serve(handler, "127.0.0.1", 0, process_request=process) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        async with GenericEnvClient(f"{url}/here") as env:
            assert (await env.reset()).observation["total"] == 2
        with pytest.raises(ConnectionFailed, match=r"redirect to http://127\.0\.0\.2:1"):
            await GenericEnvClient(f"{url}/away").connect()
        with pytest.raises(ConnectionFailed, match="more than 5 redirects"):
            await GenericEnvClient(f"{url}/round").connect()


@pytest.mark.parametrize(("code", "words"), [(1001, "going away"), (1012, "going away"), (4001, "4001: bye")])
async def test_what_a_close_code_means(code: int, words: str) -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.recv()
        await ws.close(CloseCode(code) if code < 3000 else code, "bye")

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        await env.reset()
        with pytest.raises(ConnectionLost, match=words):
            await env.step({})
        await env.reset()


async def test_a_message_in_many_frames() -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            text = frame(3, "ä" * 1000)
            await ws.send([text[:7], text[7:500], "", text[500:]])

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        for _ in range(3):
            assert (await env.reset()).observation["extra"] == "ä" * 1000


@pytest.mark.parametrize("parts", [1, 5])
async def test_a_message_that_is_too_long(parts: int) -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        text = frame(3, "x" * 300_000)
        size = len(text) // parts + 1
        await ws.send([text[n : n + size] for n in range(0, len(text), size)] if parts > 1 else text)
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url, max_message_size_mb=0.2) as env:
        with pytest.raises(ConnectionLost, match="within max_message_size_mb"):
            await env.reset()


async def test_messages_of_many_megabytes_both_ways() -> None:
    size = 30_000_000

    async def handler(ws: ServerConnection) -> None:
        async for message in ws:
            await ws.send(frame(len(message), "y" * size))

    async with (
        serve(handler, "127.0.0.1", 0, compression=None, max_size=None) as server,
        GenericEnvClient(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}") as env,
    ):
        observation = (await env.step({"text": "z" * size})).observation
        assert observation["total"] > size
        assert len(observation["extra"]) == size


@pytest.mark.parametrize("opcode", [Opcode.CONT, 3])
async def test_frames_that_break_the_rules(opcode: Any) -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        ws.transport.write(bytes([0x80 | int(opcode), 2]) + b"{}")
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        with pytest.raises(ConnectionLost):
            await env.reset()


def silent(shakes_hands: bool = True) -> tuple[asyncio.Event, Callable[..., Any]]:
    """A server of bare TCP that shakes hands, if it does, and then never says a word."""
    import base64
    import hashlib

    over = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        fields.setdefault("Sec-WebSocket-Key", "")  # a proxy is asked without one
        digest = hashlib.sha1((fields["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode())
        accept = base64.b64encode(digest.digest()).decode()
        answer = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n"
        )
        writer.write(answer.encode() if shakes_hands else b"")
        await over.wait()
        writer.close()

    return over, handler


async def test_a_server_that_is_gone_is_noticed_by_pings() -> None:
    over, handler = silent()
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"websocket_ping_interval_s": 0.1, "websocket_ping_timeout_s": 0.2}
        async with GenericEnvClient(url, message_timeout_s=None, **options) as env:
            with pytest.raises(ConnectionLost, match=r"answer a ping within 0.2 s"):
                await env.reset()
        over.set()


async def test_a_server_that_answers_pings_may_take_its_time() -> None:
    proceed = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await proceed.wait()
            await ws.send(frame(1))

    async with (
        scripted(handler) as url,
        GenericEnvClient(url, websocket_ping_interval_s=0.05, websocket_ping_timeout_s=0.05) as env,
    ):
        request = asyncio.create_task(env.reset())
        await asyncio.sleep(0.5)
        assert not request.done()
        proceed.set()
        assert (await request).observation["total"] == 1


async def test_a_server_that_never_shakes_hands() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        closed.set()
        writer.close()

    closed = asyncio.Event()
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match=r"no answer within 0.2 s"):
            await GenericEnvClient(url, connect_timeout_s=0.2).connect()
        async with asyncio.timeout(20):
            await closed.wait()


async def test_a_server_that_hangs_up_at_once_or_talks_nonsense() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop())
        writer.close()

    answers = [b"220 mail\r\n\r\n", b""]
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(ConnectionFailed, match="check that it runs"):
                await GenericEnvClient(url).connect()


async def test_closing_does_not_wait_for_ever() -> None:
    over, handler = silent()
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        env = GenericEnvClient(url, connect_timeout_s=0.3)
        await env.connect()
        async with asyncio.timeout(20):
            await env.close()
        over.set()


async def test_a_server_that_does_not_read_makes_the_writer_wait() -> None:
    over, handler = silent()
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with GenericEnvClient(url, message_timeout_s=0.1, connect_timeout_s=0.5) as env:
            for _ in range(6):
                with pytest.raises(RequestTimeout):
                    await env.step({"text": "z" * 8_000_000})
            carrier = env._carrier
            assert carrier is not None
            assert carrier.full
            # One frame is taken in beyond what the system's buffers hold, and no more.
            assert carrier._transport.underlying_transport.get_write_buffer_size() < 17_000_000  # type: ignore[attr-defined]
            over.set()


async def test_a_reader_that_does_not_read_makes_the_server_wait() -> None:
    sent = 0

    async def handler(ws: ServerConnection) -> None:
        nonlocal sent
        while True:
            await ws.send(b"x" * 1_000_000)
            sent += 1

    async with scripted(handler) as url:
        options = CarrierOptions(1.0, 2_000_000, None, None)
        carrier = await open_socket(url.replace("http", "ws"), options)
        before = -1
        async with asyncio.timeout(60):
            while before != sent:  # until the server is stuck
                before = sent
                await asyncio.sleep(0.5)
        assert len(carrier._frames) < 16  # what one read may bring beyond the limit included
        for _ in range(sent + 10):
            assert len(await carrier.recv()) == 1_000_000
        assert sent > before
        await carrier.close()


async def test_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(frame(1, "s" * 100_000))

    async with serve(handler, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://localhost:{next(iter(server.sockets)).getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match="certificate"):
            await GenericEnvClient(url).connect()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with GenericEnvClient(url) as env:
            for _ in range(3):
                assert len((await env.reset()).observation["extra"]) == 100_000


async def test_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.splitlines()[0])
        there_reader, there_writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    app = create_app(Counter, Add, Count)
    async with (
        serving(_any_host(app)) as address,
        await asyncio.start_server(handler, "127.0.0.1", 0) as proxy,
    ):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with GenericEnvClient("http://far.example:81") as env:
            assert (await env.reset(seed=4)).observation["total"] == 4
    assert asked == ["CONNECT far.example:81 HTTP/1.1"]


def _any_host(app: Any) -> Any:
    from servers.settings import ServerSettings

    app.configure(ServerSettings(allowed_hosts=("*",)))
    return app


def test_which_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "socks_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("ws://far.example") is None
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("https_proxy", "http://secure:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert proxy_for("ws://far.example") == "http://proxy:3128"
    assert proxy_for("wss://far.example") == proxy_for("https://far.example") == "http://secure:3128"
    for here in ("ws://near.example", "ws://localhost:1", "ws://127.0.0.9", "ws://[::1]:8"):
        assert proxy_for(here) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "a\nb"},
        {"token": ""},
        {"token": "t", "headers": {"authorization": "Basic x"}},
        {"headers": {"X": "a\r\nInjected: yes"}},
        {"headers": {"a b": "c"}},
        {"session_id": "a/b"},
        {"session_id": ""},
        {"mode": "training"},
        {"transport": "carrier pigeon"},
        {"provider": object()},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        GenericEnvClient("http://h:1", **settings)


def test_a_token_is_not_shown() -> None:
    env = GenericEnvClient("http://h:1", token="secret-1")
    assert "secret-1" not in repr(env._options)


async def test_a_message_that_takes_longer_than_pings_are_waited_for() -> None:
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


async def test_an_answer_that_a_busy_thread_has_not_read_yet_counts() -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(frame(1))

    loops: list[asyncio.AbstractEventLoop] = []
    ports: list[int] = []

    async def elsewhere() -> None:
        over = asyncio.Event()
        async with serve(handler, "127.0.0.1", 0) as server:
            ports.append(next(iter(server.sockets)).getsockname()[1])
            loops.append(asyncio.get_running_loop())
            ends.append(over)
            await over.wait()

    ends: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await eventually(lambda: ends)
    try:
        options = {"websocket_ping_interval_s": 600.0, "websocket_ping_timeout_s": 600.0}
        async with GenericEnvClient(f"http://127.0.0.1:{ports[0]}", **options) as env:
            await env.reset()
            carrier: Any = env._carrier
            carrier._rest()
            carrier._timer.cancel()
            carrier._ask()
            carrier._timer.cancel()
            raw = carrier._transport.underlying_transport.get_extra_info("socket")
            # This loop reads nothing meanwhile, as that of a trainer at work.
            assert select.select([raw.fileno()], [], [], 20)[0]
            carrier._judge()  # as a loop does it that looks at its timers first
            assert (await env.reset()).observation["total"] == 1
    finally:
        loops[0].call_soon_threadsafe(ends[0].set)
        thread.join()


async def test_an_address_that_does_not_answer_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(frame(1))

    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # a full queue answers nobody
        filler.setblocking(False)
        filler.connect_ex(deaf.getsockname())
    async with scripted(handler) as url:
        here = ("127.0.0.1", int(url.rpartition(":")[2]))
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (deaf.getsockname(), here)]

        async def both(*_: object, **__: object) -> Any:
            return places

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        async with GenericEnvClient("http://two.example", connect_timeout_s=2.0) as env:
            await env.reset()
    for one in (deaf, *fillers):
        one.close()


@pytest.mark.parametrize("through_proxy", [False, True])
async def test_a_handshake_that_nobody_answers_leaves_nothing_open(
    through_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, handler = silent(shakes_hands=False)

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if through_proxy:
            monkeypatch.setenv("http_proxy", url)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            url = "http://far.example"
        before = open_files()
        for _ in range(3):
            with pytest.raises(ConnectionFailed, match="no answer within"):
                await GenericEnvClient(url, connect_timeout_s=0.1).connect()
        over.set()
        await eventually(lambda: open_files() <= before)


async def test_what_is_said_unasked_is_no_reply() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.send(frame(666))
        await ws.recv()
        await ws.send(frame(2))
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url) as env:
        assert (await env.reset()).observation["total"] == 1
        carrier: Any = env._carrier
        await eventually(lambda: carrier.unread)
        with pytest.raises(ProtocolError, match=r"666.* unasked"):
            await env.step({})
        with pytest.raises(ConnectionLost, match="unasked"):
            await env.step({})
        assert (await env.reset()).observation["total"] == 1


@pytest.mark.slow
async def test_a_reply_that_is_none_is_told_at_once_whatever_the_server_does_then() -> None:
    over = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send("garbage")
        ws.transport.pause_reading()  # no closing handshake is answered
        await over.wait()

    async with scripted(handler) as url:
        env = GenericEnvClient(url, connect_timeout_s=3600)
        with pytest.raises(ProtocolError, match="garbage"):
            async with asyncio.timeout(20):
                await env.reset()
        async with asyncio.timeout(20):
            await env.close()
        over.set()


async def test_disconnecting_ends_a_request_that_waits() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.wait_closed()

    async with scripted(handler) as url, GenericEnvClient(url, message_timeout_s=None) as env:
        waiting = asyncio.create_task(env.reset())
        await eventually(lambda: env._turn.taken and env.connected)
        async with asyncio.timeout(20):
            await env.disconnect()
        with pytest.raises(ConnectionLost):
            await waiting


async def test_turns_are_fair_and_survive_cancellation() -> None:
    turn = Turn()
    order: list[int] = []

    async def work(number: int) -> None:
        with turn if turn.take() else await turn.wait():
            await asyncio.sleep(0)
            order.append(number)

    tasks = [asyncio.create_task(work(n)) for n in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 3, 4, 5]
    assert not turn.taken
    # Cancelled in the moment in which it is handed the turn.
    assert turn.take()
    heir = asyncio.create_task(work(7))
    await asyncio.sleep(0)
    turn.__exit__(None, None, None)
    heir.cancel()
    await asyncio.gather(heir, return_exceptions=True)
    assert not turn.taken
