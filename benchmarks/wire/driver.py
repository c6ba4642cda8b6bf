"""The driver: many WebSocket sessions on one thread, at a few microseconds a step.

To be cheap, it masks frames once, recognises replies by their first bytes, and uses epoll directly. Like released
clients, it offers compression in the handshake; a server that accepts the offer gets compressed frames, at the same
cost as with a real client.
"""

import os
import random
import select
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

from benchmarks.harness import BenchmarkError, percentile

TEXT: Final = 0x81
PING: Final = 0x89
PONG: Final = 0x8A
DEFLATED: Final = 0xC1
"""First byte of a final, compressed text frame."""

_KEY: Final = b"\x37\xfa\x21\x3d"
"""Clients must mask. With a constant key a frame is masked only once; servers do the same work."""


def masked(payload: bytes, opcode: int = TEXT) -> bytes:
    """Return one whole frame as a client sends it.

    Args:
        payload: At most 65,535 bytes.
        opcode: The frame's first byte.
    """
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
    key = (_KEY * (size // len(_KEY) + 1))[:size]
    # As one integer, for speed: frames with ids are masked between steps.
    body = (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(size)
    return bytes([opcode]) + length + _KEY + body


def deflated(payload: bytes) -> bytes:
    """Return a compressed text frame that refers to no previous frame, so that it can be sent repeatedly."""
    compressor = zlib.compressobj(wbits=-15)
    body = compressor.compress(payload) + compressor.flush(zlib.Z_SYNC_FLUSH)
    return masked(body.removesuffix(b"\x00\x00\xff\xff"), DEFLATED)


def split(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Split a server's bytes into complete frames, each with its first byte, and the rest."""
    frames = []
    at = 0
    while len(data) - at >= 2:
        size, begin = data[at + 1] & 0x7F, at + 2
        if size > 125:
            width = 2 if size == 126 else 8
            if len(data) < begin + width:
                break
            size, begin = int.from_bytes(data[begin : begin + width], "big"), begin + width
        if len(data) < begin + size:
            break
        frames.append((data[at], data[begin : begin + size]))
        at = begin + size
    return frames, data[at:]


_STEP: Final = b'{"type":"step","data":{"message":"hello from the driver"}}'
_RESET: Final = b'{"type":"reset","data":{}}'
STEP: Final = {False: masked(_STEP), True: deflated(_STEP)}
V1_OPENING: Final = b"".join(
    masked(frame) for frame in (b'{"id":1,"op":"open","lease_s":60}', b'{"id":2,%b' % _RESET[1:])
)
"""The first frames of a session of `ropewalk.v1`; its steps have the ids that follow."""
RESET: Final = {False: masked(_RESET), True: deflated(_RESET)}
"""The frames, by whether the server accepted compression."""

OFFER: Final = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"

V1: Final = "Sec-WebSocket-Protocol: ropewalk.v1\r\n"

PENDING: Final = 100
"""Connections that are opened at once: the backlog of a listening socket is short."""

OPEN_TIMEOUT_S: Final = 60.0
"""Seconds for each answer while sessions are opened."""

PER_ADDRESS: Final = 8_000
"""Connections from one source address. It has some 28,000 ports, which linger after use, so every load picks new
addresses among the loopback's sixteen million."""


@dataclass(slots=True)
class Run:
    """The result of one run of a load.

    Attributes:
        seconds: Duration.
        latencies: Seconds from sending a step to receiving its reply, unordered.
        failed: Steps without a reply, or with one other than an observation.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, other: "Run") -> None:
        """Add the result of another run of the load."""
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.failed += other.failed

    @property
    def steps(self) -> int:
        """The number of successful steps."""
        return len(self.latencies)

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of the latencies; 0 without steps."""
        return percentile(self.latencies, percent)


@dataclass(slots=True, eq=False)
class _Session:
    sock: socket.socket
    fd: int
    buffer: bytes = b""
    sent: float = 0.0
    left: int = 0
    number: int = 0
    step: bytes = STEP[False]
    inflate: Callable[[bytes], bytes] | None = None

    def send_step(self, now: float) -> None:
        self.sent = now
        step = self.step
        if self.number:
            self.number += 1
            step = masked(b'{"id":%d,"read":%d,%b' % (self.number, self.number - 1, _STEP[1:]))
        self.sock.send(step)

    def send_reset(self, *, v1: bool) -> None:
        self.number = 2 if v1 else 0
        self.sock.send(V1_OPENING if v1 else RESET[self.inflate is not None])


class Load:
    """A number of open sessions on one server.

    Args:
        port: Where the server listens on 127.0.0.1.
        sessions: Number of sessions to open.
        v1: Use the subprotocol `ropewalk.v1`.

    Raises:
        BenchmarkError: The server refused a session, or was too slow.
    """

    def __init__(self, port: int, sessions: int, *, v1: bool = False) -> None:
        self._port = port
        self._v1 = v1
        self._source = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
        self._poll = select.epoll()
        self._sessions: dict[int, _Session] = {}
        try:
            for first in range(0, sessions, PENDING):
                self._open(range(first, min(sessions, first + PENDING)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop every connection."""
        for session in self._sessions.values():
            session.sock.close()
        self._sessions.clear()
        self._poll.close()

    def steps_for(self, seconds: float) -> Run:
        """Step in every session, one step after another, for `seconds`; then wait for the last replies."""
        end = time.perf_counter() + seconds
        return self._run(lambda session, now: now < end, [0.0] * len(self._sessions), end + 60.0)

    def steps_each(self, count: int, spread_s: float, deadline_s: float) -> Run:
        """Take `count` steps in every session; the first steps are spread evenly over `spread_s`."""
        for session in self._sessions.values():
            session.left = count - 1

        def more(session: _Session, now: float) -> bool:
            session.left -= 1
            return session.left >= 0

        sessions = len(self._sessions)
        starts = [i * spread_s / sessions for i in range(sessions)]
        return self._run(more, starts, time.perf_counter() + deadline_s)

    def _run(self, more: Callable[[_Session, float], bool], starts: Sequence[float], deadline: float) -> Run:
        """Send the first step of each session at its time, and further ones while `more` says so."""
        run = Run()
        clock, sessions, latencies = time.perf_counter, self._sessions, run.latencies
        waiting = list(sessions.values())[::-1]
        times = list(starts)[::-1]
        busy = 0
        began = clock()
        while busy or waiting:
            now = clock()
            if now > deadline:
                break
            while waiting and began + times[-1] <= now:
                session = waiting.pop()
                times.pop()
                session.send_step(clock())
                busy += 1
            pause = max(0.0, began + times[-1] - now) if waiting else 1.0
            for fd, _ in self._poll.poll(min(pause, 1.0)):
                session = sessions[fd]
                kind = self._receive(session)
                if kind is None:
                    continue
                now = clock()
                if kind:
                    latencies.append(now - session.sent)
                else:
                    run.failed += 1
                if fd in sessions and more(session, now):
                    session.send_step(now)
                else:
                    busy -= 1
        run.seconds = clock() - began
        return run

    def _receive(self, session: _Session) -> bool | None:
        """Read from a session; True for an observation, False for anything else, None if a message is incomplete."""
        try:
            data = session.sock.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._drop(session)
            return False
        if not session.buffer and data[0] == TEXT:
            size = data[1]
            if 2 + size == len(data) if size < 126 else 4 + int.from_bytes(data[2:4], "big") == len(data):
                return _answer(data)
        return self._receive_slowly(session, data)

    def _receive_slowly(self, session: _Session, data: bytes) -> bool | None:
        """Read control frames, partial frames and compressed frames; returns as `_receive` does."""
        frames, session.buffer = split(session.buffer + data)
        answer: bool | None = None
        for opcode, payload in frames:
            if opcode == DEFLATED and session.inflate is not None:
                opcode, payload = TEXT, session.inflate(payload + b"\x00\x00\xff\xff")
            if opcode == TEXT:
                answer = _answer(payload)
            elif opcode == PING:
                session.sock.send(masked(payload, PONG))
            elif opcode != PONG:
                self._drop(session)
                answer = False
        return answer

    def _drop(self, session: _Session) -> None:
        self._poll.unregister(session.fd)
        self._sessions.pop(session.fd, None)
        session.sock.close()

    def _open(self, numbers: range) -> None:
        """Connect these sessions, upgrade and reset them."""
        opened = [self._connect(number) for number in numbers]
        for session in opened:
            self._upgrade(session)
            session.send_reset(v1=self._v1)
        for session in opened:
            while (answer := self._receive(session)) is None:
                pass
            if not answer:
                raise BenchmarkError(f"expected an observation after a reset on port {self._port}, got none")
            session.sock.setblocking(False)

    def _connect(self, number: int) -> _Session:
        sock = socket.socket()
        session = self._sessions[sock.fileno()] = _Session(sock, sock.fileno())
        self._poll.register(session.fd, select.EPOLLIN)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(OPEN_TIMEOUT_S)
        sock.bind((f"{self._source}.{1 + number // PER_ADDRESS}", 0))
        sock.connect(("127.0.0.1", self._port))
        sock.send(
            f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            f"Sec-WebSocket-Version: 13\r\n{OFFER}{V1 if self._v1 else ''}\r\n".encode()
        )
        return session

    def _upgrade(self, session: _Session) -> None:
        with suppress(OSError):
            while b"\r\n\r\n" not in session.buffer and (data := session.sock.recv(65536)):
                session.buffer += data
        head, _, session.buffer = session.buffer.partition(b"\r\n\r\n")
        if b" 101 " not in head[:16]:
            raise BenchmarkError(f"expected a WebSocket on port {self._port}, got {head[:200]!r}")
        if b"permessage-deflate" in head:
            session.inflate = zlib.decompressobj(wbits=-15).decompress
            session.step = STEP[True]


def _answer(payload: bytes) -> bool | None:
    """Return whether a message is an observation; None for the reply that opens a session."""
    if b"observation" in payload[:48]:
        return True
    return None if b'"members"' in payload[:32] else False


def pin(core: int | None) -> None:
    """Pin this process to a core; None allows all cores."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if core is None else {core})
