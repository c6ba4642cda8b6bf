"""Connections into a container without a network: whole, in order, each at its own pace, and not to be forged."""

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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenv_core import ClientError, ConnectionLostError, GenericEnvClient, ServerStartError
from openenv_core.providers.docker import (
    ContainerOptions,
    DockerEngine,
    LocalDockerProvider,
    _mux,
    _relay,
    start_container,
)
from openenv_core.providers.docker import companion as relay

pytestmark = pytest.mark.timeout(600)  # one waits for an image to be built

PATIENCE_S = 30
INNER = str(Path(_mux.__file__))


class Both(_mux.MuxTransport):
    """The standard streams of an inner side that is a process of this machine."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.reads, self.writes = process.stdout.fileno(), process.stdin.fileno()
        os.set_blocking(self.reads, False)
        os.set_blocking(self.writes, False)

    def recv(self) -> bytes:
        try:
            data = os.read(self.reads, 65_536)
        except BlockingIOError:
            return b""
        if not data:
            raise _mux.MuxBrokenError("ended")
        return data

    def send(self, data: bytes) -> int:
        try:
            return os.write(self.writes, data)
        except BlockingIOError:
            return 0


class Echo(socketserver.BaseRequestHandler):
    """Sends back what comes; at the end says goodbye."""

    def handle(self) -> None:
        while data := self.request.recv(65_536):
            self.request.sendall(data)
        self.request.sendall(b"goodbye")


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def relayed(port: int) -> Iterator[int]:
    """Both sides of a relay to a port of this machine; yield where it begins."""
    command = [sys.executable, "-I", "-S", INNER, str(port)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inner,
        socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
    ):
        listener.setblocking(False)
        assert inner.stdout is not None
        assert inner.stdout.read(len(_mux.HELLO)) == _mux.HELLO
        mux = _mux.Mux(Both(inner), listener=listener)
        ending = threading.Event()

        def turn() -> None:
            while not ending.is_set():
                mux.turn(0.05)

        thread = threading.Thread(target=turn)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ending.set()
            thread.join(PATIENCE_S)
            mux.close()
            inner.kill()


def exchange(port: int, data: bytes, pace_s: float = 0.0) -> bytes:
    """Send all of it while reading the answer; return the answer."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:

        def send() -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        answer = bytearray()
        while chunk := connection.recv(65_536):
            answer += chunk
            time.sleep(pace_s)
        thread.join(PATIENCE_S)
        return bytes(answer)


def test_many_connections_whole_and_in_order() -> None:
    with serving(Echo) as server, relayed(server) as port:
        loads = [os.urandom(size) for size in (0, 1, 1000, 300_000, 2_000_000)] * 6
        with ThreadPoolExecutor(len(loads)) as pool:
            answers = list(pool.map(lambda data: exchange(port, data), loads))
        assert [answer == data + b"goodbye" for data, answer in zip(loads, answers, strict=True)] == [
            True
        ] * 30


def fill(connection: socket.socket) -> int:
    """Send until no more is taken; return how much was."""
    connection.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 2**30:
            sent += connection.send(b"x" * 65_536)
    return sent


def test_who_does_not_read_stops_nobody_else() -> None:
    with (
        serving(Echo) as server,
        relayed(server) as port,
        socket.create_connection(("127.0.0.1", port)) as lazy,
    ):
        assert fill(lazy) < 64 * 2**20
        assert exchange(port, b"y" * 1_000_000) == b"y" * 1_000_000 + b"goodbye"


def test_a_server_that_is_not_there_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        nobody = bound.getsockname()[1]
    with relayed(nobody) as port, socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        assert connection.recv(10) == b""


def test_no_room_for_more_connections_is_waited_for() -> None:
    carrier = Scripted()

    class Full(socket.socket):
        tries = 0

        def accept(self) -> Any:
            Full.tries += 1
            raise OSError(errno.EMFILE, "too many open files")

    with Full() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        mux = _mux.Mux(carrier, listener=listener)
        ours, theirs = socket.socketpair()
        mux.streams[1] = _mux.Stream(1, theirs)
        with ours, socket.create_connection(listener.getsockname()):
            for _ in range(5):
                mux.turn(0.01)
            assert Full.tries == 1  # it was not asked again and again
            mux.drop(mux.streams[1])
            mux.turn(0.01)
            assert Full.tries == 2
    mux.close()
    carrier.close()


class Scripted(_mux.MuxTransport):
    """An inner side that says what a test wants it to."""

    def __init__(self) -> None:
        self.end, self.other = socket.socketpair()
        self.end.setblocking(False)
        self.reads = self.writes = self.end.fileno()

    def recv(self) -> bytes:
        return self.end.recv(65_536)

    def send(self, data: bytes) -> int:
        return self.end.send(data)

    def close(self) -> None:
        self.end.close()
        self.other.close()


def said_by(other: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the test may have ended
        other.sendall(data)


def framed(kind: int, number: int, data: bytes = b"", length: int | None = None) -> bytes:
    return _mux.HEADER.pack(kind, number, len(data) if length is None else length) + data


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (framed(_mux.DATA, 1, length=60_000), "longer than any"),
        (framed(_mux.DATA, 1, b"x" * 32_768) * 9, "more came than was asked for"),
        (framed(_mux.END, 1) + framed(_mux.DATA, 1, b"x"), "more came than was asked for"),
        (framed(_mux.CREDIT, 1, struct.pack(">I", 1)), "more was credited"),
        (framed(_mux.CREDIT, 1, b"x"), "no known kind"),
        (framed(_mux.OPEN, 1), "no known kind"),
        (framed(77, 1), "no known kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_forged_frame_ends_the_relay_and_costs_nothing(frames: bytes, why: str) -> None:
    carrier = Scripted()
    mux = _mux.Mux(carrier)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    mux.streams[1] = _mux.Stream(1, theirs)
    # Nobody reads, so that what comes has to wait.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    try:
        said = framed(_mux.DATA, 999, b"of a stream that there never was") + frames
        threading.Thread(target=said_by, args=(carrier.other, said), daemon=True).start()

        def until_broken() -> None:
            for _ in range(50):
                mux.turn(0.1)

        with pytest.raises(_mux.MuxBrokenError, match=why):
            until_broken()
    finally:
        mux.close()
        ours.close()
        carrier.close()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_an_engine_that_is_away_is_waited_for_and_an_inner_side_that_keeps_ending_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends: list[Exception] = [ConnectionRefusedError()] * 20 + [
        _relay._mux.MuxBrokenError("no such container")
    ] * 20

    def attach(*_: object) -> None:
        raise ends.pop(0)

    monkeypatch.setattr(_relay, "attach", attach)
    monkeypatch.setattr(_relay.signal, "signal", lambda *_: None)
    monkeypatch.setattr(_relay.select, "select", lambda *_: ([], [], []))
    listener = socket.create_server(("127.0.0.1", 0))
    assert _relay.main([str(listener.detach()), str(os.getppid()), "unix:///x", "", "1", "id", "1"]) == 1
    assert 15 <= len(ends) < 20  # all of the engine's absence, and a few of the others
    assert "no such container" in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.docker
def test_sessions_of_a_container_without_a_network(hostile_image: str) -> None:
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


@pytest.mark.soak
@pytest.mark.docker
def test_sessions_end_with_their_container_in_mid_stream(hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image, network="none") as provider:
        container = provider.container
        assert container is not None

        def play(_: int) -> None:
            with GenericEnvClient(provider.url).sync() as client:
                client.reset()
                playing.wait(PATIENCE_S)
                while True:
                    client.step({"what": "variable", "text": "A" * 100_000})

        playing = threading.Barrier(5)
        with ThreadPoolExecutor(4) as pool:
            ends = [pool.submit(play, number) for number in range(4)]
            playing.wait(PATIENCE_S)
            os.kill(container.pids()[0], signal.SIGKILL)
            assert [type(end.exception(PATIENCE_S)) for end in ends] == [ConnectionLostError] * 4


def relays() -> list[psutil.Process]:
    return [
        each for each in psutil.Process().children() if relay.RELAY_SCRIPT.name in " ".join(each.cmdline())
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
def test_a_killed_inner_side_is_replaced_and_the_relay_ends_with_its_container(hostile_image: str) -> None:
    with LocalDockerProvider(hostile_image, network="none") as provider:
        container = provider.container
        assert container is not None
        assert len(relays()) == 1
        [inner] = [pid for pid in container.pids() if "-c" in psutil.Process(pid).cmdline()]
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
    assert engine.labelled("ropewalk-test=python") == []
