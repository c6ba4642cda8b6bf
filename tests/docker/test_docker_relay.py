"""Connections into a container without a network: complete, in order, independent of each other, unforgeable."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import serving
from serve_process import eventually

from openenv_core import ClientError, EpisodeLostError, GenericEnvClient, ServerStartError
from openenv_core.providers.docker import (
    ContainerOptions,
    DockerEngine,
    LocalDockerProvider,
    _relay,
    companion,
    start_container,
)

pytestmark = pytest.mark.timeout(600)  # one waits for an image to be built

WAIT_TIMEOUT_S = 30
INNER = Path(_relay.__file__).read_text()


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
async def accepting(mux: _relay.Mux, listener: socket.socket) -> AsyncIterator[None]:
    """Let an outer side accept connections."""
    listener.setblocking(False)
    task = asyncio.get_running_loop().create_task(mux.accept(listener))
    try:
        yield
    finally:
        task.cancel()
        mux.stop(_relay.MuxBrokenError("the test ends"))
        mux.ended.exception()


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[_relay.Mux, socket.socket]]:
    """Yield an outer side, and the other end of its carrier."""
    ours, theirs = socket.socketpair()
    mux = _relay.Mux()
    await asyncio.get_running_loop().create_connection(lambda: mux, sock=ours)
    with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        async with accepting(mux, listener):
            yield mux, theirs


@asynccontextmanager
async def running_relay(port: int) -> AsyncIterator[int]:
    """Run both sides of a relay to a port of this machine; yield its address."""
    loop = asyncio.get_running_loop()
    command = [sys.executable, "-I", "-S", "-c", INNER, str(port)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as inner,  # noqa: ASYNC220 - it returns at once
        socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
    ):
        assert inner.stdout is not None
        assert await asyncio.to_thread(inner.stdout.read, len(_relay.HELLO)) == _relay.HELLO
        mux = _relay.Mux()
        reading, _ = await loop.connect_read_pipe(lambda: mux, inner.stdout)
        await loop.connect_write_pipe(lambda: mux, inner.stdin)
        async with accepting(mux, listener):
            yield listener.getsockname()[1]
        reading.close()
        inner.kill()


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


async def test_connections_over_the_limit_wait() -> None:
    class Full(socket.socket):
        tries = 0

        def accept(self) -> Any:
            Full.tries += 1
            if Full.tries < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    with Full() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with scripted() as (mux, theirs), accepting(mux, listener):
            with socket.create_connection(listener.getsockname()):
                header = await asyncio.to_thread(theirs.recv, _relay.HEADER.size)
    assert header == framed(_relay.OPEN, 1)
    assert Full.tries in (3, 4)  # it was not asked again and again


def framed(kind: int, number: int, data: bytes = b"", length: int | None = None) -> bytes:
    return _relay.HEADER.pack(kind, number, len(data) if length is None else length) + data


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (framed(_relay.DATA, 1, length=60_000), "longer than any"),
        (framed(_relay.DATA, 1, b"x" * 32_768) * 9, "more came than was asked for"),
        (framed(_relay.END, 1) + framed(_relay.DATA, 1, b"x"), "more came than was asked for"),
        (framed(_relay.CREDIT, 1, struct.pack(">I", 1)), "more was credited"),
        (framed(_relay.CREDIT, 1, b"x"), "no known kind"),
        (framed(_relay.OPEN, 1), "no known kind"),
        (framed(77, 1), "no known kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_forged_frame_ends_the_relay_only(frames: bytes, why: str) -> None:
    ours, theirs = socket.socketpair()
    # Nobody reads, so that what comes has to wait.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with scripted() as (mux, _):
        await asyncio.get_running_loop().create_connection(lambda: mux.add(1), sock=theirs)
        mux.data_received(framed(_relay.DATA, 999, b"of a stream that there never was") + frames)
        with ours, pytest.raises(_relay.MuxBrokenError, match=why):
            await mux.ended
        assert mux.streams == {}


async def test_a_connection_that_was_reset_ends_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    async with scripted() as (mux, _):
        await asyncio.get_running_loop().create_connection(lambda: mux.add(1), sock=theirs)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.close()
        mux.data_received(framed(_relay.END, 1))
        await serving.eventually(lambda: not mux.streams)
        assert not mux.ended.done()


def test_absent_engine_is_waited_for_but_a_crashing_inner_side_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = _relay.MuxBrokenError("no such container")
    ends: list[Exception] = [*[ConnectionRefusedError()] * 20, *[broken] * 20]

    def prepare(*_: object) -> None:
        raise ends.pop(0)

    monkeypatch.setattr(_relay, "prepare", prepare)
    monkeypatch.setattr(_relay.signal, "signal", lambda *_: None)
    monkeypatch.setattr(_relay.select, "select", lambda *_: ([], [], []))
    listener = socket.create_server(("127.0.0.1", 0))
    assert _relay.main([str(listener.detach()), str(os.getppid()), "unix:///x", "", "1", "id", "1"]) == 1
    assert 15 <= len(ends) < 20  # all of the engine's absence, and a few of the others
    assert "no such container" in capfd.readouterr().err


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
            os.kill(container.pids()[0], signal.SIGKILL)
            assert [type(end.exception(WAIT_TIMEOUT_S)) for end in ends] == [EpisodeLostError] * 4


def relays() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children()
        if companion.RELAY_SCRIPT.name in " ".join(each.cmdline())
    ]


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
        assert len(relays()) == 1
        [inner] = [pid for pid in provider.container.pids() if "-c" in psutil.Process(pid).cmdline()]
        psutil.Process(inner).kill()
        eventually(lambda: answers(provider.url))
    assert relays() == []


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
