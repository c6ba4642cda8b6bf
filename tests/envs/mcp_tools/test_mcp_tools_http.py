"""Tool servers over HTTP: which addresses are contacted, which answers are taken, how often they are asked."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpcore2
import httpx2
import pytest
from httpx2 import Request
from serving import eventually, serving
from starlette.responses import Response
from tool_houses import call, entry, failure_to_begin, house_of, kind, playing
from tool_site import Site, packed

from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.upstream import http
from envs.mcp_tools_env.server.upstream.addresses import check_address, resolve_checked
from envs.mcp_tools_env.server.upstream.errors import AddressRefusedError, FirstFailure
from envs.mcp_tools_env.server.upstream.http import MAX_BODY_BYTES
from openenv_core.errors import ConfigurationError
from openenv_core.outcomes import infrastructure_failure

NOT_PUBLIC = """
127.0.0.1 127.255.255.254 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 100.100.100.200 169.254.169.254
168.63.129.16 192.0.0.192 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fe80::1%eth0 fc00::1
fd00:ec2::254 fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 64:ff9b::7f00:1
64:ff9b::a9fe:a9fe 64:ff9b:1::808:808 2002:7f00:1:: 2002:a9fe:a9fe::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
2001:db8::1 no-address
"""
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1")


def is_refused(address: str) -> bool:
    with suppress(AddressRefusedError):
        check_address(address)
        return False
    return True


def test_addresses_that_are_not_public_are_refused() -> None:
    assert [address for address in NOT_PUBLIC.split() if not is_refused(address)] == []
    assert [address for address in PUBLIC if is_refused(address)] == []


class FakeNet(httpcore2.AsyncNetworkBackend):
    """Connects nowhere, and remembers where to."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def connect_tcp(self, host: str, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        self.asked.append(host)
        raise httpcore2.ConnectError("nobody is there")


async def test_a_name_that_means_another_address_the_second_time_is_looked_up_once() -> None:
    meanings = iter([["203.0.114.1", "8.8.4.4"], ["127.0.0.1"], ["127.0.0.1"]])

    async def look_up(host: str, port: int) -> list[str]:
        return next(meanings)

    net = FakeNet()
    backend = http._PinnedBackend(allow_private=False, look_up=look_up, inner=net)
    with pytest.raises(httpcore2.ConnectError):
        await backend.connect_tcp("rebinding.example", 443)
    assert net.asked == ["203.0.114.1", "8.8.4.4"]
    with pytest.raises(AddressRefusedError, match=r"127\.0\.0\.1.*rebinding\.example.*allow_private"):
        await backend.connect_tcp("rebinding.example", 443)
    assert net.asked == ["203.0.114.1", "8.8.4.4"]
    with pytest.raises(AddressRefusedError):
        await backend.connect_unix_socket("/run/docker.sock")


async def test_one_private_address_among_public_ones_is_enough() -> None:
    async def look_up(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "::ffff:10.0.0.1"]

    with pytest.raises(AddressRefusedError):
        await resolve_checked("mixed.example", 80, allow_private=False, look_up=look_up)
    assert await resolve_checked("mixed.example", 80, allow_private=True, look_up=look_up) == [
        "8.8.8.8",
        "::ffff:10.0.0.1",
    ]


def site_at(address: str, **ropewalk: Any) -> dict[str, Any]:
    return {"url": f"http://{address}/mcp", "ropewalk": {"allow_private": True, **ropewalk}}


@asynccontextmanager
async def at_site(
    site: Site, timeout_s: float = 10.0, **others: dict[str, Any]
) -> AsyncIterator[McpToolsEnvironment]:
    async with (
        serving(site.app) as address,  # type: ignore[arg-type]
        playing(house_of({"site": site_at(address, timeout_s=timeout_s), **others})) as env,
    ):
        yield env


JSON = {"content-type": "application/json"}


def test_a_literal_address_is_refused_where_it_is_configured() -> None:
    for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"):
        with pytest.raises(ConfigurationError, match="allow_private"):
            house_of({"site": {"url": f"http://{host}:80/mcp"}})


@pytest.mark.soak
async def test_no_way_of_writing_this_machine_reaches_it() -> None:
    site = Site()
    async with serving(site.app) as address:  # type: ignore[arg-type]
        port = address.rpartition(":")[2]
        for host in ("localhost", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "localhost."):
            error = await failure_to_begin({"site": {"url": f"http://{host}:{port}/mcp"}})
            assert any(words in error for words in ("a public address", "a host with", "Invalid IPv4")), host
    assert not site.seen


async def test_sessions_have_sessions_of_their_own_there_which_end_with_them() -> None:
    site = Site()
    async with serving(site.app) as address:  # type: ignore[arg-type]
        servers = {"site": {**site_at(address), "headers": {"authorization": "Bearer ${env:SITE_TOKEN}"}}}
        house = house_of(servers, {"SITE_TOKEN": "canary"})
        async with playing(house) as one, playing(house) as other:
            assert [(await call(one, "count")).result for _ in range(2)] == ["1", "2"]
            assert (await call(other, "count")).result == "1"
            assert site.headers["authorization"] == "Bearer canary"
            assert site.headers["accept-encoding"] == "identity"
            assert len(site.counts) == 2
            assert "canary" not in one.state.model_dump_json()
        assert not site.counts


async def test_proxies_of_the_environment_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    site, proxy = Site(), Site()
    async with serving(site.app) as address, serving(proxy.app) as other:  # type: ignore[arg-type]
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{other}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with playing(house_of({"site": site_at(address)})) as env:
            assert (await call(env, "count")).result == "1"
    assert not proxy.seen


ANSWERS = (
    (Response(status_code=307, headers={"location": "/elsewhere"}), "redirects"),
    (Response(status_code=302, headers={"location": "http://169.254.169.254/latest"}), "redirects"),
    (packed({"jsonrpc": "2.0", "id": 1, "result": {}}), "packs"),
    (Response(b"[" * (MAX_BODY_BYTES + 1), headers=JSON), "more than"),
    (Response("{", headers=JSON), "Failed to parse"),
    (Response("<html>", media_type="text/html"), "Unexpected content type"),
    (Response(status_code=202), "202"),
    (Response(status_code=503), "HTTP 503"),
    (Response(status_code=401), "HTTP 401"),
)


async def test_unusable_answer_is_the_servers_fault_and_the_session_lives() -> None:
    site = Site()
    async with at_site(site, own=entry()) as env:
        for answer, why in ANSWERS:
            site.answer = answer
            seen = await call(env, "site__count")
            assert kind(seen) == "transport_error"
            assert why in (infrastructure_failure(seen) or "")
            assert not seen.done
            site.answer = None
            assert kind(await call(env, "site__count")) is None
        assert (await call(env, "own__count")).result == 1
    assert not site.seen["POST /elsewhere"]


@pytest.mark.soak
async def test_a_session_that_the_server_has_forgotten_is_begun_anew() -> None:
    site = Site()
    async with at_site(site, other=entry(), timeout_s=2.0) as env:
        assert (await call(env, "site__count")).result == "1"
        assert kind(await call(env, "site__hang")) == "timeout"
        assert (await call(env, "site__count")).result == "2"
        site.counts.clear()
        lost = await call(env, "site__count")
        assert kind(lost) == "transport_error"
        assert infrastructure_failure(lost)
        again = await call(env, "site__count")
        assert (again.result, "state_lost" in again.metadata) == ("1", True)


async def test_a_server_that_changes_its_protocol_is_spoken_to_in_the_new_one() -> None:
    site = Site()
    async with serving(site.app) as address:  # type: ignore[arg-type]
        house = house_of({"site": site_at(address)})
        for handshake, mode in ((True, "legacy"), (False, "auto"), (True, "auto")):
            site.handshake = handshake
            async with playing(house) as env:
                assert kind(await call(env, "count")) is None
                assert handshake or env.state.servers[0].protocol == "2026-07-28"
            assert house.modes == {"site": mode}
        site.handshake = False
        told = house_of({"site": site_at(address, protocol="stateless")})
        async with playing(told) as env:
            assert kind(await call(env, "count")) is None
        assert told.modes == {}


@pytest.mark.soak
async def test_a_server_that_does_not_listen_yet_is_waited_for() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # connections are refused until it listens
        address = f"127.0.0.1:{place.getsockname()[1]}"
        why = await failure_to_begin({"site": site_at(address, start_timeout_s=0.3)})
        assert "expected it to start within 0.3 s; it cannot be reached" in why
        env = McpToolsEnvironment(house_of({"site": site_at(address)}))
        beginning = asyncio.create_task(env.reset_async())
        await asyncio.sleep(0.3)  # it is refused, if the machine is not too busy to ask
        async with serving(Site().app, place):  # type: ignore[arg-type]
            assert not (began := await beginning).done, began.metadata
            await env.close_async()


async def test_a_server_that_refuses_to_be_connected_to_says_why() -> None:
    site = Site()
    site.handshake = False
    async with serving(site.app) as address, asyncio.timeout(60):  # type: ignore[arg-type]
        why = await failure_to_begin({"site": site_at(address, protocol="handshake")})
    assert "refused the connection" in why


@pytest.mark.soak
async def test_timed_out_http_calls_keep_no_connection() -> None:
    site = Site()
    async with at_site(site, timeout_s=0.05) as env:
        for _ in range(20):  # more than there are connections
            seen = await call(env, "hang")
            assert (kind(seen), infrastructure_failure(seen)) == ("timeout", None)
        async with asyncio.timeout(60):
            while kind(await call(env, "count")) is not None:  # on a busy machine 50 ms may be too short
                pass
        await eventually(lambda: site.given_up >= site.hung)


async def test_a_stream_of_a_call_that_has_ended_is_not_resumed() -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield b"id: 1\ndata:\n\n"
        raise httpx2.ReadTimeout("silent")

    stream: Any = silent()
    bounded = http._BoundedStream(stream, fault := FirstFailure(), events=True)
    with pytest.raises(httpx2.SSEError):
        assert [chunk async for chunk in bounded]
    assert fault.take() is None


async def test_a_few_requests_for_events_go_at_once_and_further_ones_are_spaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [1000.0], list[float]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    async def ended_stream(_: object, request: Request) -> httpx2.Response:
        content = httpx2.ByteStream(b"")
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=content)

    monkeypatch.setattr(http.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", ended_stream)
    transport = http._PinnedTransport(FirstFailure(), allow_private=True, silence_s=1)

    async def waits(count: int) -> list[float]:
        waited.clear()
        for _ in range(count):
            await transport.handle_async_request(Request("GET", "http://127.0.0.1/mcp"))
        return waited

    # A stream that breaks, and is asked for again when the server said, is none of those that are held up.
    assert await waits(http.GETS_AT_ONCE) == [0.0] * http.GETS_AT_ONCE
    assert await waits(3) == pytest.approx([http.GET_INTERVAL_S] * 3)
    now[0] += 2 * http.GET_INTERVAL_S
    assert await waits(3) == pytest.approx([0.0, 0.0, http.GET_INTERVAL_S])
