"""The controller's end of a membership, for hosts that are no more than a connection."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import RoleError
from rl_bridge.services import joining
from rl_bridge.services.joining import JoinServer, join_run, make_secret

LIMIT_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""
ADDRESS = "tcp://10.0.0.9:26600"


class RecordingFleet:
    """Records which hosts come and go."""

    def __init__(self) -> None:
        self.hosts: list[tuple[Any, ...]] = []
        self.added, self.removed = asyncio.Event(), asyncio.Event()
        self.unreachable = False

    async def add_host(self, address: str, gpus: int) -> int:
        if self.unreachable:
            raise RoleError(f"expected to reach the worker {address}, got: nothing")
        self.hosts.append(("added", address, gpus))
        self.added.set()
        return 5

    async def remove_host(self, number: int, *, notice: bool) -> None:
        self.hosts.append(("removed", number, notice))
        self.removed.set()


class Host:
    """One connection to the controller."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def send(self, message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Any:
        """Return the next message; None at the connection's end."""
        async with asyncio.timeout(LIMIT_S):
            line = await self._reader.readline()
        return json.loads(line) if line else None


@contextlib.asynccontextmanager
async def connected(server: JoinServer) -> AsyncIterator[Host]:
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Host(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def server() -> AsyncIterator[JoinServer]:
    async with JoinServer("127.0.0.1", 0, "s3cret", notice_file="/run/notice") as server:
        yield server


@pytest.fixture
def fleet() -> Any:
    return RecordingFleet()


REQUEST = {"secret": "s3cret", "gpus": 2}
ADMITTED = {"admitted": True, "notice_file": "/run/notice"}


async def test_host_joins_once_the_run_has_started_and_leaves_after_a_notice(
    server: JoinServer, fleet: Any
) -> None:
    async with connected(server) as host:
        host.send(REQUEST)
        async with server.admit(fleet):
            assert await host.receive() == ADMITTED
            host.send({"address": ADDRESS})
            host.send({"leave": True})
            assert await host.receive() == {"released": True}
            assert await host.receive() is None
    assert fleet.hosts == [("added", ADDRESS, 2), ("removed", 5, True)]


async def test_host_whose_connection_ends_is_lost(server: JoinServer, fleet: Any) -> None:
    async with server.admit(fleet), connected(server) as host, asyncio.timeout(LIMIT_S):
        host.send(REQUEST)
        assert await host.receive() == ADMITTED
        host.send({"address": ADDRESS})
        await fleet.added.wait()
        host.writer.transport.abort()
        await fleet.removed.wait()
    assert fleet.hosts == [("added", ADDRESS, 2), ("removed", 5, False)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"secret": "guessed", "gpus": 0}, "the secret is not that of this run"),
        ({"secret": "\ud800", "gpus": 0}, "the secret is not that of this run"),
        ({"secret": "s3cret"}, "the request needs a secret and a number of gpus"),
        (["GET / HTTP/1.1"], "the request needs a secret and a number of gpus"),
    ],
)
async def test_stranger_is_refused(server: JoinServer, fleet: Any, message: Any, reason: str) -> None:
    async with server.admit(fleet), connected(server) as host:
        host.send(message)
        assert reason in (await host.receive())["refused"]
        assert await host.receive() is None
    assert fleet.hosts == []


async def test_strangers_take_no_places_of_hosts_and_are_bounded(
    server: JoinServer, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "MAX_HOSTS", 1)
    monkeypatch.setattr(joining, "MAX_STRANGERS", 2)
    async with server.admit(fleet), connected(server), connected(server) as host:
        async with connected(server) as third:
            assert await third.receive() is None
        host.send(REQUEST)
        assert await host.receive() == ADMITTED
        async with connected(server) as next_host:
            next_host.send(REQUEST)
            assert "1 hosts have joined already" in (await next_host.receive())["refused"]


async def test_host_that_cannot_be_reached_is_refused(server: JoinServer, fleet: Any) -> None:
    fleet.unreachable = True
    async with server.admit(fleet), connected(server) as host:
        host.send(REQUEST)
        assert await host.receive() == ADMITTED
        host.send({"address": ADDRESS})
        assert f"expected to reach the worker {ADDRESS}" in (await host.receive())["refused"]


async def test_end_of_the_run_is_announced(fleet: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with JoinServer("127.0.0.1", 0, "s3cret") as server, server.admit(fleet):
            host = await stack.enter_async_context(connected(server))
            host.send(REQUEST)
            assert await host.receive() == {"admitted": True, "notice_file": None}
        assert await host.receive() == {"over": True}


async def test_host_that_comes_while_the_run_ends_is_left_with_nobody() -> None:
    """However far its connection has got by then: no task waits on for a run that is over."""
    before = asyncio.all_tasks()
    for turns in range(3, 8):  # earlier it is asyncio itself that drops a connection
        async with JoinServer("127.0.0.1", 0, "s3cret") as server:
            host, _, port = server.address.removeprefix("tcp://").rpartition(":")
            connection = socket.create_connection((host, int(port)))
            connection.sendall(json.dumps(REQUEST).encode() + b"\n")
            for _ in range(turns):
                await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        connection.close()
        assert asyncio.all_tasks() == before, turns


def test_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    (tmp_path / "join.secret.partial").touch()  # of a process that was killed meanwhile
    secret = make_secret(tmp_path)
    assert len(secret) == 64
    assert make_secret(tmp_path) == secret
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_host_reports_why_it_is_refused(server: JoinServer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("guessed")
    with pytest.raises(
        RoleError, match="the controller refuses this host: the secret is not that of this run"
    ):
        await join_run(server.address, tmp_path / "secret")


async def test_file_of_a_notice_has_the_host_leave(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def worker(_: str) -> AsyncIterator[asyncio.Task[bool]]:
        yield asyncio.create_task(asyncio.Event().wait())

    monkeypatch.setattr("rl_bridge.services.joining._run_worker", worker)  # which needs Monarch
    (tmp_path / "secret").write_text("s3cret")
    notice = tmp_path / "notice"
    async with JoinServer("127.0.0.1", 0, "s3cret", notice_file=str(notice)) as server, server.admit(fleet):
        joining = asyncio.create_task(join_run(server.address, tmp_path / "secret"))
        async with asyncio.timeout(LIMIT_S):
            await fleet.added.wait()
            assert [host[0] for host in fleet.hosts] == ["added"]
            notice.touch()
            await joining
    assert fleet.hosts[1:] == [("removed", 5, True)]
