"""The status server: snapshots and metrics for any caller, none of whom can harm the run."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import eventually as until

from rl_bridge.errors import ConfigError, StatusError
from rl_bridge.metrics import status as status_server
from rl_bridge.metrics.status import (
    StatusServer,
    StatusSnapshot,
    choose_status_host,
    format_address,
    parse_address,
    request_status,
)
from tests.rl_bridge.metrics.status_fixtures import snapshot


@pytest.mark.parametrize(
    ("host", "is_local", "served_on"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("no-such-host.invalid", True, "127.0.0.1"),
        ("192.0.2.1", False, "192.0.2.1"),
    ],
)
def test_local_run_serves_status_on_loopback(host: str, is_local: bool, served_on: str) -> None:
    assert choose_status_host(host, is_local=is_local) == served_on


async def test_concurrent_requests_share_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "SNAPSHOT_MAX_AGE_S", 60.0)  # however long the crowd takes
    taken = 0

    def take() -> StatusSnapshot:
        nonlocal taken
        taken += 1
        return snapshot()

    async with StatusServer("127.0.0.1", 0, take) as server:
        await asyncio.gather(*(request_status(server.address) for _ in range(20)))
        assert taken == 1
        monkeypatch.setattr(status_server, "SNAPSHOT_MAX_AGE_S", 0.05)
        await asyncio.sleep(0.1)
        await request_status(server.address)
        assert taken == 2


async def test_failed_snapshot_is_reported_and_the_next_may_succeed() -> None:
    broken = True

    def take() -> StatusSnapshot:
        if broken:
            raise RuntimeError("the ledger is on fire")
        return snapshot()

    async with StatusServer("127.0.0.1", 0, take) as server:
        with pytest.raises(StatusError, match="the ledger is on fire"):
            await request_status(server.address)
        broken = False
        await asyncio.sleep(status_server.SNAPSHOT_MAX_AGE_S * 1.5)
        assert await request_status(server.address) == snapshot()


@asynccontextmanager
async def callers_who_do_not_read(count: int) -> AsyncIterator[StatusServer]:
    """A server that has more to say than the buffers of a socket hold, and callers who ask."""
    async with StatusServer("127.0.0.1", 0, snapshot) as server:
        server._body = b"x" * (64 << 20)
        server._taken_at = float("inf")
        with ExitStack() as callers:
            for _ in range(count):
                caller = callers.enter_context(socket.create_connection(parse_address(server.address)))
                caller.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            await until(lambda: len(server._callers) == count)
            yield server


async def test_callers_that_do_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "MAX_CALLERS", 4)
    monkeypatch.setattr(status_server, "TIMEOUT_S", 60.0)  # none of them is let go meanwhile
    async with callers_who_do_not_read(4) as server:
        with pytest.raises(StatusError):
            await request_status(server.address)  # one too many
        assert len(server._callers) == 4


async def test_callers_that_do_not_read_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "TIMEOUT_S", 0.3)
    async with callers_who_do_not_read(1) as server:
        await until(lambda: not server._callers)
        monkeypatch.setattr(status_server, "TIMEOUT_S", 60.0)
        server._taken_at = -1.0
        assert await request_status(server.address) == snapshot()


async def test_other_servers_are_not_taken_for_a_run() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(StatusError, match=r"SSH-2\.0"):
            await request_status(f"127.0.0.1:{port}")
    with pytest.raises(StatusError, match="is the run under way"):
        await request_status(f"127.0.0.1:{port}")


async def test_silent_server_is_waited_for_until_the_timeout() -> None:
    gone = asyncio.Event()

    async def keep_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    async with await asyncio.start_server(keep_still, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(StatusError, match=r"within 0\.1 s"):
            await request_status(f"127.0.0.1:{port}", timeout_s=0.1)
        await gone.wait()


@pytest.mark.parametrize(
    ("address", "parsed"), [("10.0.0.1:29500", ("10.0.0.1", 29500)), ("[::1]:80", ("::1", 80))]
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed
    assert format_address(*parsed) == address


@pytest.mark.parametrize("address", ["head:", "::1:80", "head:65536"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address as HOST:PORT"):
        parse_address(address)


async def test_metrics_are_those_of_the_snapshot_and_browsers_of_others_get_none() -> None:
    async with StatusServer("127.0.0.1", 0, snapshot) as server, httpx.AsyncClient(trust_env=False) as http:
        url = f"http://{server.address}"
        reply = await http.get(f"{url}/metrics")
        samples = {
            (sample.name, *(value for label, value in sample.labels.items() if label != "run")): sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
        }
        assert samples == {
            ("ropewalk_run_iterations",): 150,
            ("ropewalk_run_version",): 12,
            ("ropewalk_run_served_version",): 11,
            ("ropewalk_run_elapsed_seconds",): 3725,
            ("ropewalk_run_groups", "leased"): 2,
            ("ropewalk_run_groups", "finished"): 3,
            ("ropewalk_run_groups", "trained"): 96,
            ("ropewalk_run_groups", "dropped"): 1,
            ("ropewalk_run_oldest_lease_seconds",): 61,
            ("ropewalk_run_replicas", "policy", "serving"): 1,
            ("ropewalk_run_replicas", "policy", "restarting"): 1,
            ("ropewalk_run_calls_in_flight", "policy"): 7,
            ("ropewalk_run_restarts_total", "policy"): 2,
            ("ropewalk_run_process_seconds_total", "work", "trainer-0", "train"): 50,
            ("ropewalk_run_process_seconds_total", "idle", "trainer-0", "batches"): 49,
            ("ropewalk_run_process_seconds_total", "unaccounted", "trainer-0", ""): 1,
            ("ropewalk_run_process_cpu_seconds_total", "trainer-0"): 50,
            ("ropewalk_run_metric", "reward/mean"): -0.25,
        }
        assert (await http.get(f"{url}/status")).json()["version"] == 12
        assert (await http.get(f"{url}/elsewhere")).status_code == 404
        assert (await http.post(f"{url}/metrics")).status_code == 404
        for host, status in (("evil.example.org", 421), ("localhost:1", 200), ("[::1]:1", 200)):
            assert (await http.get(f"{url}/metrics", headers={"host": host})).status_code == status


async def test_caller_without_a_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "TIMEOUT_S", 0.3)
    async with StatusServer("127.0.0.1", 0, snapshot) as server:
        for request in (b"", b"x" * 100_000):
            reader, writer = await asyncio.open_connection(*parse_address(server.address))
            writer.write(request)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        await until(lambda: not server._callers)
        monkeypatch.setattr(status_server, "TIMEOUT_S", 60.0)
        assert await request_status(server.address) == snapshot()
