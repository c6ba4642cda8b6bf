"""Streams of bytes over one carrier, and the side of a relay that is inside the container.

    python3 -I -S -c SOURCE PORT        SOURCE is this very text

Each stream is one connection. It has a window in each direction: who is slow to read stops who sends to it, and
nobody else. The other side is not trusted: a frame that breaks the rules raises MuxBrokenError. The standard
library only, and nothing newer than Python 3.8.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import sys

HELLO = b"ropewalk-relay-1\n"
HEADER = struct.Struct(">BIH")
OPEN, DATA, END, RESET, CREDIT = range(5)

CHUNK = 32_768
WINDOW = 262_144
"""How much of a stream may be under way in one direction, in bytes."""

AHEAD = 1_048_576
"""No stream is read while this much waits to go to the other side."""

STREAMS = 4096


class MuxBrokenError(Exception):
    """The other side ended, or broke the rules."""


class Stream:
    """One connection, as one side has it."""

    def __init__(self, number: int, connection: socket.socket, connecting: bool = False) -> None:
        self.number = number
        self.connection = connection
        self.connecting = connecting  # the server has not yet taken it
        self.credit = WINDOW  # what may still be sent to the other side
        self.eaten = 0  # what was written and not yet credited
        self.waiting = bytearray()  # what came from the other side
        self.read_end = self.write_end = False  # no more is read here; no more comes to be written
        self.shut = False


class Mux:
    """Streams over one carrier, which has recv(), send() and a descriptor for each."""

    def __init__(
        self, carrier: MuxTransport, port: int | None = None, listener: socket.socket | None = None
    ) -> None:
        self.carrier = carrier
        self.port = port
        self.listener = listener
        self.streams: dict[int, Stream] = {}
        self.most = STREAMS
        self.numbers = 0
        self.arrived = bytearray()
        self.leaving = bytearray()
        self.selector = selectors.DefaultSelector()
        self.registered: dict[int, int] = {}

    def close(self) -> None:
        """Close every stream."""
        for stream in list(self.streams.values()):
            self.drop(stream)
        self.selector.close()

    def turn(self, timeout_s: float, *more: int) -> bool:
        """Wait for something and do it; return whether one of the further descriptors is readable."""
        self.interests(more)
        seen = False
        for key, events in self.selector.select(timeout_s):
            if key.data is None:
                seen = seen or key.fd in more
                if self.listener is not None and key.fd == self.listener.fileno():
                    self.accept()
                if key.fd == self.carrier.reads:
                    self.receive()
                continue
            stream: Stream = key.data
            if self.streams.get(stream.number) is stream:  # nothing before it in this turn closed it
                self.serve(stream, events)
        while self.carrier.more:
            self.receive()
        self.send()
        return seen

    def interests(self, more: tuple[int, ...]) -> None:
        """Tell the selector what to wait for."""
        wanted: dict[int, tuple[int, Stream | None]] = dict.fromkeys(more, (selectors.EVENT_READ, None))
        room = len(self.leaving) < AHEAD
        wanted[self.carrier.reads] = (selectors.EVENT_READ, None)
        if self.leaving:
            events = wanted.get(self.carrier.writes, (0, None))[0]
            wanted[self.carrier.writes] = (events | selectors.EVENT_WRITE, None)
        if self.listener is not None and room and len(self.streams) < self.most:
            wanted[self.listener.fileno()] = (selectors.EVENT_READ, None)
        for stream in self.streams.values():
            events = selectors.EVENT_READ if room and stream.credit and not stream.read_end else 0
            if stream.waiting or (stream.write_end and not stream.shut):
                events |= selectors.EVENT_WRITE
            if stream.connecting:
                events = selectors.EVENT_WRITE
            if events:
                wanted[stream.connection.fileno()] = (events, stream)
        for fd in [fd for fd in self.registered if fd not in wanted]:
            self.forget(fd)
        for fd, (events, data) in wanted.items():
            if fd not in self.registered:
                self.selector.register(fd, events, data)
            elif self.registered[fd] != events:
                self.selector.modify(fd, events, data)
            self.registered[fd] = events

    def forget(self, fd: int) -> None:
        """Stop waiting for a descriptor."""
        if self.registered.pop(fd, None) is not None:
            self.selector.unregister(fd)

    def accept(self) -> None:
        """Take a connection, and have the other side make one."""
        assert self.listener is not None
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # No room for more: it stays readable, and is not looked at before there is.
                self.most = max(1, len(self.streams))
            return
        self.numbers = self.numbers % 0xFFFFFFFF + 1
        self.add(self.numbers, connection)
        self.frame(OPEN, self.numbers)

    def add(self, number: int, connection: socket.socket, connecting: bool = False) -> None:
        """Have a stream for a connection."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.streams[number] = Stream(number, connection, connecting)

    def serve(self, stream: Stream, events: int) -> None:
        """Read from and write to one connection."""
        try:
            if stream.connecting and not self.connected(stream):
                return  # what comes for it waits
            if events & selectors.EVENT_READ:
                self.read(stream)
            if events & selectors.EVENT_WRITE:
                self.write(stream)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.frame(RESET, stream.number)
            self.drop(stream)

    def connected(self, stream: Stream) -> bool:
        """Whether the server has taken the connection. Raises OSError where it never will."""
        error = stream.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            stream.connection.getpeername()
        except OSError:
            return False
        stream.connecting = False
        return True

    def read(self, stream: Stream) -> None:
        """Send on what a connection has to say."""
        data = stream.connection.recv(min(stream.credit, CHUNK))
        if data:
            stream.credit -= len(data)
            self.frame(DATA, stream.number, data)
        else:
            stream.read_end = True
            self.frame(END, stream.number)
            self.finish(stream)

    def write(self, stream: Stream) -> None:
        """Say to a connection what came for it."""
        if stream.waiting:
            sent = stream.connection.send(stream.waiting[:CHUNK])
            del stream.waiting[:sent]
            stream.eaten += sent
            if stream.eaten >= WINDOW // 4:
                self.frame(CREDIT, stream.number, struct.pack(">I", stream.eaten))
                stream.eaten = 0
        if stream.write_end and not stream.waiting and not stream.shut:
            stream.shut = True
            stream.connection.shutdown(socket.SHUT_WR)
            self.finish(stream)

    def finish(self, stream: Stream) -> None:
        """Let go of a connection that has ended in both directions."""
        if stream.read_end and stream.shut:
            self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Close a connection."""
        self.forget(stream.connection.fileno())
        stream.connection.close()
        self.streams.pop(stream.number, None)
        self.most = STREAMS

    def frame(self, kind: int, number: int, data: bytes = b"") -> None:
        """Have a frame sent to the other side."""
        self.leaving += HEADER.pack(kind, number, len(data)) + data

    def send(self) -> None:
        """Send to the other side what it takes."""
        while self.leaving:
            sent = self.carrier.send(bytes(self.leaving[:65_536]))
            if not sent:
                return
            del self.leaving[:sent]

    def receive(self) -> None:
        """Take what the other side sent."""
        self.arrived += self.carrier.recv()
        at = 0
        while len(self.arrived) - at >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self.arrived, at)
            if length > CHUNK:
                raise MuxBrokenError("a frame is longer than any may be")
            if len(self.arrived) - at < HEADER.size + length:
                break
            begin = at + HEADER.size
            at = begin + length
            self.take(kind, number, bytes(self.arrived[begin:at]))
        del self.arrived[:at]

    def take(self, kind: int, number: int, data: bytes) -> None:
        """Do what a frame says."""
        if kind == OPEN and self.port is not None and number not in self.streams:
            self.connect(number, self.port)
            return
        stream = self.streams.get(number)
        if stream is None:
            return  # it has been closed here, and the other side did not know yet
        if kind == DATA:
            stream.waiting += data
            if len(stream.waiting) + stream.eaten > WINDOW or stream.write_end:
                raise MuxBrokenError("more came than was asked for")
            self.serve(stream, selectors.EVENT_WRITE)
        elif kind == END:
            stream.write_end = True
            self.serve(stream, selectors.EVENT_WRITE)
        elif kind == RESET:
            self.drop(stream)
        elif kind == CREDIT and len(data) == 4:
            stream.credit += int(struct.unpack(">I", data)[0])
            if stream.credit > WINDOW:
                raise MuxBrokenError("more was credited than was sent")
        else:
            raise MuxBrokenError("a frame of no known kind")

    def connect(self, number: int, port: int) -> None:
        """Connect a stream to the server, which may have no room in its queue for a while."""
        try:
            connection = socket.socket()
        except OSError:
            self.frame(RESET, number)
            return
        connection.setblocking(False)
        said = connection.connect_ex(("127.0.0.1", port))
        if said in (0, errno.EINPROGRESS):
            self.add(number, connection, said != 0)
        else:
            connection.close()
            self.frame(RESET, number)


class MuxTransport:
    """What frames go over."""

    reads: int
    writes: int
    more = False  # whether there is more than recv() returned, which no selector tells

    def recv(self) -> bytes:
        """Return what is there. Raises MuxBrokenError at the end."""
        raise NotImplementedError

    def send(self, data: bytes) -> int:
        """Return how much of it was taken. Raises MuxBrokenError at the end."""
        raise NotImplementedError


class Pipes(MuxTransport):
    """The standard streams of the inner side."""

    def __init__(self) -> None:
        self.reads, self.writes = 0, 1
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    def recv(self) -> bytes:
        """Return what is there."""
        try:
            data = os.read(0, 65_536)
        except BlockingIOError:
            return b""
        if not data:
            raise MuxBrokenError("the other side is gone")
        return data

    def send(self, data: bytes) -> int:
        """Return how much of it was taken."""
        try:
            return os.write(1, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise MuxBrokenError(str(error)) from error


def inside(port: int) -> None:
    """Be the inner side until the other is gone."""
    mux = Mux(Pipes(), port=port)
    mux.leaving += HELLO
    try:
        while True:
            mux.turn(60.0)
    except MuxBrokenError:
        os._exit(0)


if __name__ == "__main__":
    inside(int(sys.argv[1]))
