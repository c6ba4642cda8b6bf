"""Connections into a container without a network: complete, in order, independent of each other, unforgeable."""

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil
import pytest
import serving
from owned_containers import pids_of
from serve_process import eventually

from openenv_core import (
    ClientError,
    EngineRefusedError,
    EngineUnavailableError,
    EpisodeLostError,
    GenericEnvClient,
    ServerStartError,
)
from openenv_core.providers.docker import (
    ContainerOptions,
    DockerEngine,
    LocalDockerProvider,
    mux,
    relay,
    start_container,
)

pytestmark = pytest.mark.timeout(600)  # one waits for an image to be built

WAIT_TIMEOUT_S = 30


class Echo(socketserver.BaseRequestHandler):
    """Echoes its input, and says goodbye at the end."""

    def handle(self) -> None:
        while data := self.request.recv(65_536):
            self.request.sendall(data)
        self.request.sendall(b"goodbye")


@contextmanager
def echoing() -> Iterator[int]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@asynccontextmanager
async def carrying(outer: mux.Mux) -> AsyncIterator[int]:
    """Let an outer side carry the connections of a port; yield the port."""
    running = asyncio.ensure_future(outer.run())
    async with await asyncio.start_server(outer.open, "127.0.0.1", 0, backlog=128) as server:
        yield server.sockets[0].getsockname()[1]
        running.cancel()
        await asyncio.wait([running])


@asynccontextmanager
async def running_relay(port: int) -> AsyncIterator[int]:
    """Run both sides of a relay to a port of this machine; yield its address."""
    command = [sys.executable, "-I", "-S", "-c", inspect.getsource(mux), str(port)]
    pipe = asyncio.subprocess.PIPE
    inner = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert inner.stdin is not None
    assert inner.stdout is not None
    assert await inner.stdout.readexactly(len(mux.HELLO)) == mux.HELLO
    async with carrying(mux.Mux(inner.stdout, inner.stdin)) as address:
        yield address
    await inner.wait()  # it ends with its outer side


def exchange(port: int, data: bytes) -> bytes:
    """Send all data while reading the answer; return the answer."""
    with socket.create_connection(("127.0.0.1", port), WAIT_TIMEOUT_S) as connection:

        def send() -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        answer = bytearray()
        while chunk := connection.recv(65_536):
            answer += chunk
        thread.join(WAIT_TIMEOUT_S)
        return bytes(answer)


async def test_many_connections_arrive_complete_and_in_order() -> None:
    with echoing() as server, ThreadPoolExecutor(30) as pool:
        async with running_relay(server) as port:
            loads = [os.urandom(size) for size in (0, 1, 1000, 300_000, 2_000_000)] * 6
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(
                *(loop.run_in_executor(pool, exchange, port, data) for data in loads)
            )
    assert [answer == data + b"goodbye" for data, answer in zip(loads, answers, strict=True)] == [True] * 30


def fill(port: int) -> tuple[socket.socket, int]:
    """Send until the buffers are full; return the connection and the number of bytes."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 2**30:
            sent += connection.send(b"x" * 65_536)
    return connection, sent


@pytest.mark.slow
async def test_unread_connection_blocks_no_other() -> None:
    with echoing() as server:
        async with running_relay(server) as port:
            lazy, sent = await asyncio.to_thread(fill, port)
            with lazy:
                assert sent < 64 * 2**20
                answer = await asyncio.to_thread(exchange, port, b"y" * 1_000_000)
    assert answer == b"y" * 1_000_000 + b"goodbye"


async def test_missing_server_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        nobody = bound.getsockname()[1]
    async with running_relay(nobody) as port:
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(exchange, port, b"") == b""


def framed(kind: int, number: int, data: bytes = b"", length: int | None = None) -> bytes:
    return mux.HEADER.pack(kind, number, len(data) if length is None else length) + data


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (framed(mux.DATA, 1, length=60_000), "longer than any"),
        (framed(mux.DATA, 1, b"x" * 32_768) * 12, "more came than was asked for"),
        (framed(mux.END, 1) + framed(mux.DATA, 1, b"x"), "more came than was asked for"),
        (framed(mux.CREDIT, 1, struct.pack(">I", 1)), "more was credited"),
        (framed(mux.CREDIT, 1, b"x"), "no known kind"),
        (framed(mux.OPEN, 1), "no known kind"),
        (framed(77, 1), "no known kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_forged_frame_ends_the_relay_only(frames: bytes, why: str) -> None:
    carrier, forger = socket.socketpair()
    accepted, client = socket.socketpair()
    # Nobody reads, so that what comes has to wait.
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with client, forger:
        outer = mux.Mux(*await asyncio.open_connection(sock=carrier))
        outer.open(*await asyncio.open_connection(sock=accepted))
        stray = framed(mux.DATA, 999, b"of a connection that there never was")
        sending = asyncio.create_task(asyncio.to_thread(forger.sendall, stray + frames))
        with pytest.raises(mux.MuxError, match=why):
            await outer.run()
        forger.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([sending])
        await serving.eventually(lambda: not outer.channels)


async def test_a_connection_that_was_reset_ends_alone() -> None:
    with echoing() as server:
        async with running_relay(server) as port:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            assert await asyncio.to_thread(exchange, port, b"x") == b"xgoodbye"


def test_absent_engine_is_waited_for_but_a_crashing_inner_side_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EngineRefusedError("no such container", 404, "no such container")
    ends: list[Exception] = [*[EngineUnavailableError("away")] * 20, *[broken] * 20]

    class Engine:
        def create_exec(self, *_: object, **__: object) -> None:
            raise ends.pop(0)

    monkeypatch.setattr(relay, "MIN_PAUSE_S", 0.0)
    starting: Any = relay.Relay(Engine(), "id", 1)  # type: ignore[arg-type]
    eventually(lambda: starting.failure == "no such container")
    assert 14 <= len(ends) < 20  # all of the engine's absence, and a few of the others
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", starting.port))


@pytest.mark.soak
@pytest.mark.docker
def test_sessions_end_with_their_container_in_mid_stream(hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image, network="none") as provider:
        container = provider.container
        assert container is not None

        def play(_: int) -> None:
            with GenericEnvClient(provider.url).sync() as client:
                client.reset()
                playing.wait(WAIT_TIMEOUT_S)
                while True:
                    client.step({"what": "variable", "text": "A" * 100_000})

        playing = threading.Barrier(5)
        with ThreadPoolExecutor(4) as pool:
            ends = [pool.submit(play, number) for number in range(4)]
            playing.wait(WAIT_TIMEOUT_S)
            os.kill(pids_of(container)[0], signal.SIGKILL)
            assert [type(end.exception(WAIT_TIMEOUT_S)) for end in ends] == [EpisodeLostError] * 4


def answers(url: str | None) -> bool:
    try:
        with GenericEnvClient(url).sync() as client:
            client.reset()
    except ClientError:
        return False
    return True


@pytest.mark.soak
@pytest.mark.docker
def test_sessions_of_a_container_without_a_network_survive_a_kill_of_its_inner_side(
    hostile_image: str,
) -> None:
    room = {"ROPEWALK_MAX_SESSIONS": "32"}
    with LocalDockerProvider(hostile_image, network="none", pids=None, env_vars=room) as provider:

        def play(number: int) -> str:
            with GenericEnvClient(provider.url).sync() as client:
                client.reset()
                for _ in range(20):
                    client.step({"what": "variable", "text": "A" * 1000 * number})
                return str(client.step({"what": "interfaces"}).observation["said"])

        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(play, range(32))) == ["lo"] * 32
        assert provider.container is not None
        [inner] = [pid for pid in pids_of(provider.container) if "-c" in psutil.Process(pid).cmdline()]
        psutil.Process(inner).kill()
        eventually(lambda: answers(provider.url))
        url = provider.url
    assert not answers(url)


@pytest.mark.soak
@pytest.mark.docker
def test_an_image_without_python_says_what_is_missing(engine: DockerEngine, hostile_image: str) -> None:
    # The interpreter is there under another name only, which is what an image without one looks like.
    options = ContainerOptions(
        network="none",
        env_vars={"PATH": "/nowhere"},
        command=["/bin/sleep", "60"],
        labels={"ropewalk-test": "python"},
    )
    with pytest.raises(ServerStartError, match="no python3 in its PATH"):
        start_container(hostile_image, options)
    assert engine.list_labelled("ropewalk-test=python") == []
