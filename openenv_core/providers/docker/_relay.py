"""Carries connections into a container that has no network, over one `exec` of its engine.

    python _relay.py FD PARENT URL CERTIFICATES VERIFY CONTAINER PORT

It accepts connections on FD, a socket that listens on the loopback interface. Each becomes a stream of frames on the
standard streams of a process inside the container, which connects it to the server's port (`_mux.py`). Should that
process die while its container lives, another takes its place. It ends when its standard input does, or its parent
PARENT. The standard library only.
"""

from __future__ import annotations

import http.client
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openenv_core.providers.docker import _mux, _wire
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import _mux
    import _wire

POLL_INTERVAL_S = 0.5
HELLO_TIMEOUT_S = 20.0

AWAY = (FileNotFoundError, ConnectionRefusedError)
"""What a connection to an engine fails of that does not run."""

TRIES = 6
STEADY_UPTIME_S = 10.0
"""An inner side that lasted this long is replaced at once; one that keeps ending is given up after some tries."""


def main(arguments: list[str]) -> int:
    """Be the host's side until the program is done, or gone."""
    fd, parent, url, certificates, verify, container, port = arguments
    address = _wire.EngineAddress(url, certificates or None, verify == "1")
    # Ctrl-C reaches every process of a terminal; the program decides what becomes of its container.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    room_for_connections()
    failures = 0
    with socket.socket(fileno=int(fd)) as listener:
        listener.setblocking(False)
        while True:
            begin = time.monotonic()
            try:
                connection, already = attach(address, container, port)
                with connection:
                    carry(Attached(connection, already), listener, int(parent))
                return 0
            except (_mux.MuxBrokenError, OSError, ValueError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
                away = isinstance(error, AWAY)
            failures = failures + 1 if time.monotonic() - begin < STEADY_UPTIME_S else 0
            if away:
                # Containers may outlive a restart of their engine.
                failures = min(failures, TRIES - 1)
            if "executable file not found" in why:
                why = "the image has no python3 in its PATH, which a container without a network needs"
                failures = TRIES
            if failures >= TRIES or os.getppid() != int(parent):
                print(why, file=sys.stderr)  # noqa: T201
                return 1
            if select.select([0], [], [], 0.05 * 2**failures)[0]:
                return 0


def room_for_connections() -> None:
    """Have as many descriptors as there may be connections, where the system gives so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _mux.STREAMS + 64
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def carry(carrier: Attached, listener: socket.socket, parent: int) -> None:
    """Carry connections until the program is done. Raises MuxBrokenError when the inner side ends."""
    greet(carrier)
    mux = _mux.Mux(carrier, listener=listener)
    mux.arrived += carrier.first
    try:
        while os.getppid() == parent:
            if mux.turn(POLL_INTERVAL_S, 0):
                return
    finally:
        mux.close()


def greet(carrier: Attached) -> None:
    """Wait until the inner side is there."""
    deadline = time.monotonic() + HELLO_TIMEOUT_S
    said = bytearray()
    while len(said) < len(_mux.HELLO):
        if not select.select([carrier.reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise _mux.MuxBrokenError("the inner side did not answer")
        try:
            said += carrier.recv()
        except _mux.MuxBrokenError:
            break
    if not said.startswith(_mux.HELLO):
        raise _mux.MuxBrokenError(
            (said + carrier.said)[:1000].decode(errors="replace").strip() or "the inner side ended"
        )
    carrier.first = bytes(said[len(_mux.HELLO) :])


def attach(address: _wire.EngineAddress, container: str, port: str) -> tuple[socket.socket, bytes]:
    """Start the inner side; return the connection to its standard streams and what came on it already."""
    with open(_mux.__file__) as file:
        command = ["python3", "-I", "-S", "-c", file.read(), port]
    body = {"Cmd": command, "AttachStdin": True, "AttachStdout": True, "AttachStderr": True}
    answer = _wire.call(address, "POST", f"/containers/{container}/exec", body=body)
    if answer.status != 201:
        raise _mux.MuxBrokenError(answer.text())
    start = b'{"Detach": false, "Tty": false}'
    connection: socket.socket = _wire.dial(address, HELLO_TIMEOUT_S)
    try:
        connection.sendall(
            b"POST /exec/%s/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: %d\r\n\r\n%s"
            % (answer.json()["Id"].encode(), len(start), start)
        )
        head = b""
        while b"\r\n\r\n" not in head and len(head) < 65_536:
            data = connection.recv(65_536)
            if not data:
                break
            head += data
        head, _, rest = head.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] not in ([b"101"], [b"200"]):
            raise _mux.MuxBrokenError((head + b" " + rest)[-1000:].decode(errors="replace"))
    except BaseException:
        connection.close()
        raise
    return connection, rest


class Attached(_mux.MuxTransport):
    """The engine's connection to the standard streams of an exec, as the host's side has it.

    What comes has a header before each piece of it: which stream, three zeros, the length.
    """

    def __init__(self, connection: socket.socket, already: bytes) -> None:
        self.connection = connection
        self.reads = self.writes = connection.fileno()
        self.raw = bytearray(already)
        self.left, self.kind = 0, 0
        self.said = bytearray()  # on standard error
        self.first = b""
        connection.setblocking(False)

    def recv(self) -> bytes:
        """Return what is there."""
        self.more = ended = False
        while True:
            try:
                data = self.connection.recv(65_536)
            except OSError as error:
                # TLS says so in its own way.
                ended = not isinstance(error, BlockingIOError) and "Want" not in type(error).__name__
                break
            if not data:
                ended = True
                break
            self.raw += data
            if len(self.raw) > _mux.AHEAD:
                self.more = True
                break
        out = self.unpacked()
        if ended and not out:
            raise _mux.MuxBrokenError("the inner side ended")
        return out

    def unpacked(self) -> bytes:
        """Return what of the pieces is the inner side's standard output."""
        out = bytearray()
        while self.raw:
            if not self.left:
                if len(self.raw) < 8:
                    break
                self.kind, self.left = self.raw[0], int.from_bytes(self.raw[4:8], "big")
                del self.raw[:8]
                continue
            piece = self.raw[: self.left]
            del self.raw[: len(piece)]
            self.left -= len(piece)
            if self.kind == 1:
                out += piece
            else:
                self.said += piece
                del self.said[:-4096]
        return bytes(out)

    def send(self, data: bytes) -> int:
        """Return how much of it was taken."""
        try:
            return self.connection.send(data)
        except OSError as error:
            if isinstance(error, BlockingIOError) or "Want" in type(error).__name__:
                return 0
            raise _mux.MuxBrokenError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
