"""Opening the client's WebSocket: refusals, redirects, TLS, proxies, silent addresses."""

import asyncio
import os
import socket
import ssl
import subprocess
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from counter import Add, Count, Counter
from scripted import scripted, url_of
from serving import eventually, reconfigured, serving
from socket_servers import frame, reply_seven, silent_server
from websockets.asyncio.server import Request, Response, ServerConnection
from websockets.datastructures import Headers

from openenv_core import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    GenericEnvClient,
)
from openenv_core.proxies import proxy_for
from servers import create_app


def refusing(status: int, **headers: str) -> Callable[[ServerConnection, Request], Response]:
    def process_request(connection: ServerConnection, request: Request) -> Response:
        fields = Headers({name.replace("_", "-"): value for name, value in headers.items()})
        fields["Content-Length"] = "3"
        return Response(status, HTTPStatus(status).phrase, fields, b"why")

    return process_request


async def test_refused_handshake_raises_by_status() -> None:
    status = 0

    def process(connection: ServerConnection, request: Request) -> Response:
        return refusing(status, Retry_After="3")(connection, request)

    expected: list[tuple[int, type[ClientError], str]] = [
        (401, AuthenticationError, "token= in Python, ROPEWALK_TOKEN"),
        (403, AccessRefusedError, "origin"),
        (421, AccessRefusedError, "host name"),
        (404, ConnectionFailedError, 'transport="http"'),
        (500, ConnectionFailedError, "HTTP 500: why"),
        (503, CapacityError, "why"),
        (429, CapacityError, "why"),
    ]
    async with scripted(reply_seven, process_request=process) as url:
        for status, error, expected_text in expected:  # noqa: B007 - read by the server
            with pytest.raises(error, match=expected_text) as raised:
                await GenericEnvClient(url, queue_timeout_s=0).connect()
            assert type(raised.value) is error
            if isinstance(raised.value, CapacityError):
                assert raised.value.retry_after_s == 3


async def test_headers_and_tokens_are_sent() -> None:
    requests: list[Any] = []

    async def handler(ws: ServerConnection) -> None:
        requests.append((ws.request.path, dict(ws.request.headers.raw_items())))
        await reply_seven(ws)

    async with scripted(handler) as url:
        async with GenericEnvClient(url, headers={"X-Where": "here"}, token="t0") as env:
            await env.reset()
            async with await env.new_session() as other:
                await other.reset()
        host = url.removeprefix("http://")
        async with GenericEnvClient(f"ws://me:p%40ss@{host}/base/ws?a=b", session_id="s-1") as env:
            await env.reset()
    for path, headers in requests[:2]:
        assert (path, headers["X-Where"], headers["Authorization"]) == ("/ws", "here", "Bearer t0")
    path, headers = requests[2]
    assert path == "/base/ws?a=b&session_id=s-1"
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert headers["Host"] == host


async def test_secrets_of_a_url_stay_out_of_errors() -> None:
    status: int | None = None

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if status is not None:
            place = "http://you:hush@127.0.0.2:1/ws?key=hush"
            writer.write(f"HTTP/1.1 {status} So\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        address = url_of(server).removeprefix("http://")
        for transport in ("websocket", "http"):
            for status in (None, 401, 404, 307):
                env = GenericEnvClient(f"http://me:hush@{address}/base?key=hush", transport=transport)
                with pytest.raises(ClientError, match="expected") as failed:
                    await env.reset()
                await env.close()
                assert "hush" not in str(failed.value)
                assert address in str(failed.value) or status is None
    assert "hush" not in repr(GenericEnvClient("http://h:1", token="hush")._session.settings)


async def test_redirects_stay_on_the_host() -> None:
    def process(connection: ServerConnection, request: Request) -> Response | None:
        places = {
            "/here/ws": "/there/ws#part",
            "/away/ws": "http://127.0.0.2:1/ws",
            "/round/ws": "/round/ws",
            "/other/ws": "ftp://127.0.0.1/ws",
        }
        place = places.get(request.path)
        return place and refusing(307, Location=place)(connection, request)  # type: ignore[return-value]

    async with scripted(reply_seven, process_request=process) as url:
        async with GenericEnvClient(f"{url}/here") as env:
            assert (await env.reset()).observation["total"] == 7
        for path, expected_text in (
            ("away", r"redirect to http://127\.0\.0\.2:1"),
            ("round", "more than 5 redirects"),
            ("other", "redirect to ftp://"),
        ):
            with pytest.raises(ConnectionFailedError, match=expected_text):
                await GenericEnvClient(f"{url}/{path}").connect()


async def test_closed_or_invalid_handshake_is_a_connection_error() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop())
        writer.close()

    answers = [b"220 mail\r\n\r\n", b""]
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = url_of(server)
        for _ in range(2):
            with pytest.raises(ConnectionFailedError, match="check that it runs"):
                await GenericEnvClient(url).connect()


async def test_tls_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def reply_at_length(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(frame(7, "s" * 100_000))

    async with scripted(reply_at_length, ssl=context) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(ConnectionFailedError, match="certificate"):
            await GenericEnvClient(url).connect()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with GenericEnvClient(url) as env:
            for _ in range(3):
                assert len((await env.reset()).observation["extra"]) == 100_000


def use_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


async def test_connection_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    request_lines: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_lines.append(head.splitlines()[0])
        there_reader, there_writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    app = reconfigured(create_app(Counter, Add, Count), allowed_hosts=("*",))
    async with serving(app) as address, await asyncio.start_server(handler, "127.0.0.1", 0) as proxy:
        use_proxy(monkeypatch, url_of(proxy))
        async with GenericEnvClient("http://far.example:81") as env:
            assert (await env.reset(seed=4)).observation["total"] == 4
    assert request_lines == ["CONNECT far.example:81 HTTP/1.1"]


def test_proxy_is_chosen_by_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for here in ("LocalHost.", "one.localhost", "0.0.0.0:8000", "[::]:8000", "[::ffff:127.0.0.1]"):
        assert proxy_for(f"http://{here}/v1") is None
    for there in ("notlocalhost", "localhost.example", "10.0.0.1", "[::ffff:10.0.0.1]"):
        assert proxy_for(f"http://{there}/v1") == "http://proxy:3128"
    monkeypatch.setenv("no_proxy", "near.example, 10.0.0.0/8,fd00::/8,no/network")
    for near in ("near.example", "10.9.9.9:80", "[fd12::1]"):
        assert proxy_for(f"http://{near}/v1") is None
    for there in ("11.0.0.1", "[fe80::1]", "far.example"):
        assert proxy_for(f"http://{there}/v1") == "http://proxy:3128"


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
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"expected|both a token"):
        GenericEnvClient("http://h:1", **settings)


async def test_silent_address_does_not_hide_another(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # a full queue answers nobody
        filler.setblocking(False)
        filler.connect_ex(deaf.getsockname())
    async with scripted(reply_seven) as url:
        here = ("127.0.0.1", int(url.rpartition(":")[2]))
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", at) for at in (deaf.getsockname(), here)]

        async def both(*_: object, **__: object) -> Any:
            return places

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        async with GenericEnvClient("http://two.example", connect_timeout_s=4.0) as env:
            await env.reset()
    for one in (deaf, *fillers):
        one.close()


@pytest.mark.parametrize("through_proxy", [False, True])
async def test_unanswered_handshake_leaves_no_open_files(
    through_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with silent_server(shakes_hands=False) as url:
        if through_proxy:
            use_proxy(monkeypatch, url)
            url = "http://far.example"
        before = open_files()
        for _ in range(3):
            with pytest.raises(ConnectionFailedError, match="no answer within"):
                await GenericEnvClient(url, connect_timeout_s=0.1).connect()
    await eventually(lambda: open_files() <= before)
