"""Access control before anything else: Host, Origin, token; over HTTP and sockets, on every route."""

import json
from typing import Any

import counter
import pytest
from serving import ask, http_client, serving, socket_to
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from servers import create_app
from servers.security import Guard, Tokens
from servers.settings import ServerSettings

TOKEN = "correct-horse-battery-staple"
OTHER = "another-token-of-good-length"
ROUTES = (
    ("GET", "/health"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metadata"),
    ("GET", "/schema"),
    ("POST", "/mcp"),
    ("POST", "/reset"),
    ("POST", "/step"),
    ("GET", "/state"),
    ("GET", "/capacity"),
    ("GET", "/counter/splits"),
    ("GET", "/no/such/route"),
)


async def answer(settings: ServerSettings, headers: list[tuple[str, str]], **scope: Any) -> tuple[int, Any]:
    """Send one HTTP request to a guard; return the status, and the error or the principal."""
    scopes: list[Scope] = []
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    request = {"type": "http", "headers": raw, "server": ("127.0.0.1", 8000), "path": "/", **scope}
    await Guard(app, settings)(request, receive, send)
    if sent[0]["status"] == 200:
        return 200, scopes[0]["ropewalk.principal"]
    return sent[0]["status"], json.loads(sent[1]["body"])["detail"]


LOOPBACK = {"server": ("127.0.0.1", 8000)}
ELSEWHERE = {"server": ("172.17.0.2", 8000)}


HOSTS: list[tuple[dict[str, Any], str, int]] = [
    (LOOPBACK, "localhost:8000", 200),
    (LOOPBACK, "LOCALHOST", 200),
    (LOOPBACK, "localhost.", 200),
    (LOOPBACK, "127.0.0.1:9", 200),
    (LOOPBACK, "[::1]:8000", 200),
    (LOOPBACK, "10.0.0.7", 200),
    (LOOPBACK, "env-7", 421),
    (LOOPBACK, "rebound.example.com", 421),
    (LOOPBACK, "localhost.example.com", 421),
    (LOOPBACK, "2130706433", 421),
    ({"server": ("::1", 8000)}, "rebound.example.com", 421),
    ({"server": ("::ffff:127.0.0.1", 8000)}, "env-7", 421),
    (ELSEWHERE, "env-7:8000", 200),
    (ELSEWHERE, "localhost", 200),
    (ELSEWHERE, "10.0.0.7:8000", 200),
    (ELSEWHERE, "rebound.example.com", 421),
    ({"server": ("/run/worker.sock", None)}, "env-7", 200),
    ({"server": None}, "rebound.example.com", 421),
    (LOOPBACK, "", 400),
    (LOOPBACK, "local host", 400),
    (LOOPBACK, "localhost:port", 400),
    (LOOPBACK, "localhost:99999", 400),
    (LOOPBACK, "user@localhost", 400),
    (LOOPBACK, "localhost/..", 400),
    (LOOPBACK, "[::1", 400),
    (LOOPBACK, "[::zz]", 400),
]


async def test_host_header_is_checked() -> None:
    for where, host, status in HOSTS:
        got, detail = await answer(ServerSettings(), [("Host", host)], **where)
        assert got == status, (where, host)
        if status == 421:
            assert "--allowed-host" in detail
            assert "ROPEWALK_ALLOWED_HOSTS" in detail
    for hosts in ([], ["localhost", "localhost"], ["localhost", "evil.com"]):
        assert (await answer(ServerSettings(), [("Host", host) for host in hosts]))[0] == 400


ALLOWED = [
    ("env.example.org", "ENV.example.org:443", 200),
    ("env.example.org", "other.example.org", 421),
    ("*.example.org", "a.b.example.org", 200),
    ("*.example.org", "example.org", 421),
    ("*.example.org", "notexample.org", 421),
    ("*", "whatever.example.com", 200),
]


async def test_allowed_hosts_extend_the_default() -> None:
    for allowed, host, status in ALLOWED:
        got, _ = await answer(ServerSettings(allowed_hosts=(allowed,)), [("Host", host)])
        assert got == status, (allowed, host)


ORIGINS = [
    ("localhost:8000", "http://localhost:8000", 200),
    ("localhost", "http://localhost", 200),
    ("localhost:80", "http://localhost", 200),
    ("localhost", "https://localhost:443", 200),
    ("[::1]:8000", "http://[::1]:8000", 200),
    ("LocalHost:8000", "HTTP://LOCALHOST:8000", 200),
    ("localhost:8000", "http://localhost:8001", 403),
    ("localhost:8000", "http://localhost", 403),
    ("localhost:8000", "http://127.0.0.1:8000", 403),
    ("localhost:8000", "https://evil.example.com", 403),
    ("localhost:8000", "null", 403),
    ("localhost:8000", "", 403),
    ("localhost:8000", "http://localhost:8000@evil.example.com", 403),
    ("localhost:8000", "chrome-extension://localhost:8000", 403),
    ("localhost:8000", "https://good.example.com", 200),
    ("localhost:8000", "https://good.example.com:443", 200),
    ("localhost:8000", "http://good.example.com", 403),
]


async def test_origin_header_is_checked() -> None:
    settings = ServerSettings(allowed_origins=("https://good.example.com",))
    for host, origin, status in ORIGINS:
        got, detail = await answer(settings, [("Host", host), ("Origin", origin)])
        assert got == status, (host, origin)
        assert status == 200 or "ROPEWALK_ALLOWED_ORIGINS" in detail
    own = ("Origin", "http://localhost")
    assert (await answer(ServerSettings(), [("Host", "localhost"), own, own]))[0] == 403
    anyone = ServerSettings(allowed_origins=("*",))
    assert (await answer(anyone, [("Host", "localhost"), ("Origin", "null")]))[0] == 200


PRESENTED: list[list[str]] = [
    [],
    [""],
    ["Bearer"],
    ["Bearer "],
    [f"Basic {TOKEN}"],
    [TOKEN],
    [f"Bearer {TOKEN}x"],
    [f"Bearer {TOKEN[:-1]}"],
    [f"Bearer {TOKEN} {TOKEN}"],
    ["Bearer \xff\xfe"],
    [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
]


async def test_requests_without_a_valid_token_are_refused() -> None:
    settings = ServerSettings(tokens=(TOKEN, OTHER))
    for presented in PRESENTED:
        headers = [("Host", "localhost"), *(("Authorization", value) for value in presented)]
        status, detail = await answer(settings, headers)
        assert status == 401, presented
        assert TOKEN not in detail


async def test_each_token_has_its_own_principal() -> None:
    settings = ServerSettings(tokens=(TOKEN, OTHER))
    names = []
    for token in (TOKEN, OTHER):
        headers = [("Host", "localhost"), ("Authorization", f"bearer  {token}")]
        status, name = await answer(settings, headers)
        assert status == 200
        names.append(name)
    assert len({*names, ""}) == 3
    assert all(token not in name for token in (TOKEN, OTHER) for name in names)
    without = await answer(ServerSettings(), [("Host", "localhost"), ("Authorization", "Bearer x")])
    assert without == (200, "")


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr("servers.security.hmac.compare_digest", compare)
    tokens = Tokens([TOKEN, OTHER, "a-third-token-of-good-length"])
    for presented in (TOKEN, OTHER):
        tokens.principal([f"Bearer {presented}".encode()])
    assert compared == [32] * 6


async def test_host_is_checked_before_origin_before_token() -> None:
    settings = ServerSettings(tokens=(TOKEN,))
    origin = ("Origin", "https://evil.example.com")
    assert (await answer(settings, [("Host", "evil.example.com"), origin]))[0] == 421
    assert (await answer(settings, [("Host", "localhost"), origin]))[0] == 403
    assert (await answer(settings, [("Host", "localhost")]))[0] == 401


def guarded_counter(**settings: Any) -> Any:
    app = create_app(counter.Counter, counter.Add, counter.Count, max_concurrent_envs=4)
    return Guard(app, ServerSettings(**settings))


async def test_every_route_requires_the_token() -> None:
    async with (
        serving(guarded_counter(tokens=(TOKEN,))) as address,
        http_client(address) as client,
    ):
        for method, path in ROUTES:
            refused = await client.request(method, path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["content-type"] == "application/json"
            assert "Bearer TOKEN" in refused.json()["detail"]
            let_in = await client.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"})
            assert let_in.status_code != 401, path
        assert (await client.options("/health")).status_code == 401


REFUSED_SOCKETS: list[tuple[dict[str, str], int]] = [
    ({}, 401),
    ({"Authorization": "Bearer wrong"}, 401),
    ({"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example.com"}, 403),
    ({"Authorization": f"Bearer {TOKEN}", "Host": "rebound.example.com"}, 421),
]


@pytest.mark.parametrize("path", ["/ws", "/mcp", "/no/such/socket"])
async def test_socket_is_refused_before_it_is_accepted(path: str) -> None:
    async with serving(guarded_counter(tokens=(OTHER, TOKEN))) as address:
        host, port = address.split(":")
        for headers, status in REFUSED_SOCKETS:
            url = f"ws://{headers.get('Host', host)}:{port}{path}"
            extra = {name: value for name, value in headers.items() if name != "Host"}
            with pytest.raises(InvalidStatus) as refused:
                async with connect(
                    url, host=host, port=int(port), additional_headers=extra, compression=None, proxy=None
                ):
                    pass
            assert refused.value.response.status_code == status
            assert "detail" in json.loads(refused.value.response.body)
            if status == 401:
                assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"
        if path == "/ws":
            async with socket_to(address, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as ws:
                assert (await ask(ws, {"type": "reset"}))["type"] == "observation"


async def test_refusal_without_the_response_extension_closes_before_accept() -> None:
    sent: list[Any] = []

    async def never(*_: Any) -> None:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "headers": [(b"host", b"localhost")], "server": ("127.0.0.1", 1)}
    await Guard(never, ServerSettings(tokens=(TOKEN,)))(scope, never, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
