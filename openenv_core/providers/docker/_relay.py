"""Relays connections into a container without a network, over one `exec` of its engine.

    python _relay.py FD PARENT URL CERTIFICATES VERIFY CONTAINER PORT
    python3 -I -S -c SOURCE PORT        the inner side, in the container; SOURCE is the text of this file

The outer side accepts connections on FD, a listening socket on the loopback interface. Each connection becomes a stream
of frames on the standard streams of the inner side, which connects it to the server's port. Each stream has a window in
each direction, so that a slow reader blocks only its own sender. The inner side is not trusted: an invalid frame ends
it. If it ends while the container is running, it is replaced. The relay ends at end of file on its standard input, or
when its parent PARENT dies. Uses only the standard library, and in the container only features of Python 3.8.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from openenv_core.providers.docker import _wire
elif "__file__" in globals():  # undefined with -c, in the container
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import _wire

HELLO = b"ropewalk-relay-2\n"
HEADER = struct.Struct(">BIH")
OPEN, DATA, END, RESET, CREDIT = range(5)

CHUNK = 32_768
WINDOW = 262_144
"""Flow-control window of a stream in one direction, in bytes."""

AHEAD = 1_048_576
"""Bytes waiting for the other side at which no stream is read any more."""

STREAMS = 4096

POLL_INTERVAL_S = 0.5
HELLO_TIMEOUT_S = 20.0
ACCEPT_RETRY_INTERVAL_S = 0.05
"""Pause after `accept` failed, for lack of descriptors."""

TRIES = 6
STEADY_UPTIME_S = 10.0
"""An inner side that lasted this long resets the count of failures; the relay ends after TRIES in a row."""


class MuxBrokenError(Exception):
    """The other side ended, or violated the protocol."""


class Stream(asyncio.Protocol):
    """One connection, on one side."""

    def __init__(self, mux: Mux, number: int) -> None:
        self.mux = mux
        self.number = number
        self.transport: asyncio.Transport | None = None  # None until the connection to the server is made
        self.credit = WINDOW  # bytes that may still be sent to the other side
        self.unsent = bytearray()  # read, but may not be sent yet
        self.early = bytearray()  # received before the connection was made
        self.owed = 0  # received, and not credited to the other side yet
        self.read_end = self.end_sent = self.write_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(WINDOW // 2, WINDOW // 4)
        if self.mux.streams.get(self.number) is not self:
            transport.abort()  # the other side has closed it
            return
        if self.mux.port is None:
            self.mux.send(OPEN, self.number)
        if self.mux.full:
            transport.pause_reading()
        if self.early:
            transport.write(bytes(self.early))
            self.early.clear()
        self.credit_written()

    def data_received(self, data: bytes) -> None:
        self.unsent += data
        self.flush()

    def eof_received(self) -> bool:
        """Record the end of the connection's input; data may still be sent to it."""
        self.read_end = True
        self.flush()
        return True

    def resume_writing(self) -> None:
        self.credit_written()

    def connection_lost(self, error: Exception | None) -> None:
        if self.mux.forget(self) and not (self.end_sent and self.write_end):
            self.mux.send(RESET, self.number)

    def flush(self) -> None:
        assert self.transport is not None
        while self.unsent and self.credit:
            data = bytes(self.unsent[: min(self.credit, CHUNK)])
            del self.unsent[: len(data)]
            self.credit -= len(data)
            self.mux.send(DATA, self.number, data)
        if self.unsent or self.mux.full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        if self.read_end and not self.unsent and not self.end_sent:
            self.end_sent = True
            self.mux.send(END, self.number)
            self.finish()

    def take(self, data: bytes) -> None:
        """Write received data to the connection."""
        self.owed += len(data)
        if self.owed > WINDOW or self.write_end:
            raise MuxBrokenError("more came than was asked for")
        if self.transport is None:
            self.early += data
        else:
            self.transport.write(data)
            self.credit_written()

    def take_end(self) -> None:
        self.write_end = True
        self.credit_written()

    def take_credit(self, size: int) -> None:
        self.credit += size
        if self.credit > WINDOW:
            raise MuxBrokenError("more was credited than was sent")
        if self.transport is not None:
            self.flush()

    def credit_written(self) -> None:
        """Send credit for written data, and write end of file after the last of it."""
        if self.transport is None:
            return
        written = self.owed - self.transport.get_write_buffer_size()
        if written >= WINDOW // 4:
            self.owed -= written
            self.mux.send(CREDIT, self.number, struct.pack(">I", written))
        if self.write_end and not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # the connection was reset, which asyncio has not noticed yet
                self.transport.abort()
            else:
                self.finish()

    def finish(self) -> None:
        """Remove a connection that has ended in both directions."""
        if self.end_sent and self.write_end and self.transport is not None:
            self.transport.close()


class Mux(asyncio.Protocol):
    """Multiplexes streams over one carrier: the inner side's standard streams, or the connection to them."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port  # the server's port; only on the inner side
        self.carrier: asyncio.WriteTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams: dict[int, Stream] = {}
        self.room = asyncio.Semaphore(STREAMS)
        self.number = 0
        self.arrived = bytearray()
        self.full = False
        self.connecting: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(AHEAD, AHEAD // 4)
            self.carrier = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.stop(MuxBrokenError(str(error) if error else "the inner side ended"))

    def pause_writing(self) -> None:
        self.full = True
        for stream in self.streams.values():
            if stream.transport is not None:
                stream.transport.pause_reading()

    def resume_writing(self) -> None:
        self.full = False
        for stream in list(self.streams.values()):
            if stream.transport is not None:
                stream.flush()

    def data_received(self, data: bytes) -> None:
        self.arrived += data
        at = 0
        try:
            while len(self.arrived) - at >= HEADER.size:
                kind, number, length = HEADER.unpack_from(self.arrived, at)
                if length > CHUNK:
                    raise MuxBrokenError("a frame is longer than any may be")
                if len(self.arrived) - at < HEADER.size + length:
                    break
                begin = at + HEADER.size
                at = begin + length
                self.take(kind, number, bytes(self.arrived[begin:at]))
        except MuxBrokenError as error:
            self.stop(error)
        del self.arrived[:at]

    def take(self, kind: int, number: int, data: bytes) -> None:
        stream = self.streams.get(number)
        if kind == OPEN and self.port is not None and stream is None:
            task = asyncio.get_running_loop().create_task(self.connect(self.add(number), self.port))
            self.connecting.add(task)
            task.add_done_callback(self.connecting.discard)
        elif stream is None:
            return  # closed here, before the other side knew
        elif kind == DATA:
            stream.take(data)
        elif kind == END:
            stream.take_end()
        elif kind == RESET:
            self.forget(stream)
            if stream.transport is not None:
                stream.transport.abort()
        elif kind == CREDIT and len(data) == 4:
            stream.take_credit(int(struct.unpack(">I", data)[0]))
        else:
            raise MuxBrokenError("a frame of no known kind")

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        if self.carrier is not None and not self.ended.done():
            self.carrier.write(HEADER.pack(kind, number, len(data)) + data)

    def add(self, number: int) -> Stream:
        self.streams[number] = Stream(self, number)
        return self.streams[number]

    def forget(self, stream: Stream) -> bool:
        """Remove a stream, and return whether it was registered."""
        known = self.streams.get(stream.number) is stream
        if known:
            del self.streams[stream.number]
            self.room.release()
        return known

    def stop(self, reason: MuxBrokenError) -> None:
        """Abort all streams and the carrier."""
        if not self.ended.done():
            self.ended.set_exception(reason)
        for stream in list(self.streams.values()):
            self.forget(stream)
            if stream.transport is not None:
                stream.transport.abort()
        if self.carrier is not None and not self.carrier.is_closing():
            self.carrier.abort()

    async def connect(self, stream: Stream, port: int) -> None:
        """Connect a stream to the server, whose accept queue may be full for a while."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
        except OSError:
            if self.forget(stream):
                self.send(RESET, stream.number)

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections, up to `STREAMS` at once; the other side opens one for each."""
        loop = asyncio.get_running_loop()
        while True:
            await self.room.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                self.room.release()
                await asyncio.sleep(ACCEPT_RETRY_INTERVAL_S)
                continue
            self.number = self.number % 0xFFFFFFFF + 1
            await loop.connect_accepted_socket(partial(self.add, self.number), connection)


async def run_inside(port: int) -> None:
    """Run the inner side until the outer side is gone."""
    loop = asyncio.get_running_loop()
    mux = Mux(port)
    await loop.connect_read_pipe(lambda: mux, os.fdopen(0, "rb", 0))
    await loop.connect_write_pipe(lambda: mux, os.fdopen(1, "wb", 0))
    assert mux.carrier is not None
    mux.carrier.write(HELLO)
    with suppress(MuxBrokenError):
        await mux.ended
    os._exit(0)


class Attached(Mux):
    """The outer side, on the engine's connection to an exec's standard streams.

    It receives the head of an HTTP response, then multiplexed pieces of those streams, beginning with HELLO.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raw = bytearray()
        self.in_head = True
        self.splitter = _wire.StreamSplitter()
        self.greeted = asyncio.Event()
        self.greeting = bytearray()
        self.stderr = bytearray()  # the inner side's standard error

    def data_received(self, data: bytes) -> None:
        if self.in_head:
            self.raw += data
            head, end, rest = bytes(self.raw).partition(b"\r\n\r\n")
            if not end and len(head) < 65_536:
                return
            if head.split(b" ", 2)[1:2] not in ([b"101"], [b"200"]):
                self.stop(MuxBrokenError((head + b" " + rest)[-1000:].decode(errors="replace")))
                return
            self.in_head, data = False, rest
            self.raw.clear()
        out = self.unpack_output(data)
        if not self.greeted.is_set():
            self.greeting += out
            out = bytes(self.greeting[len(HELLO) :])
            if not HELLO.startswith(self.greeting[: len(HELLO)]):
                self.stop(MuxBrokenError(self.greeting[:1000].decode(errors="replace")))
                return
            if len(self.greeting) < len(HELLO):
                return
            self.greeted.set()
        super().data_received(out)

    def connection_lost(self, error: Exception | None) -> None:
        """Stop, with the inner side's standard error as the reason."""
        output = (self.greeting + self.stderr)[:1000].decode(errors="replace").strip()
        if output and not self.greeted.is_set():
            self.stop(MuxBrokenError(output))
        super().connection_lost(error)

    def unpack_output(self, data: bytes) -> bytes:
        """Return the inner side's standard output; keep the end of its standard error."""
        out = bytearray()
        for stream, piece in self.splitter.feed(data):
            if stream == 1:
                out += piece
            else:
                self.stderr += piece
                del self.stderr[:-4096]
        return bytes(out)


def prepare(address: _wire.EngineAddress, container: str, port: str) -> bytes:
    """Create the exec of the inner side; return the request that starts it."""
    command = ["python3", "-I", "-S", "-c", Path(__file__).read_text(), port]
    body = {"Cmd": command, "AttachStdin": True, "AttachStdout": True, "AttachStderr": True}
    answer = _wire.call(address, "POST", f"/containers/{container}/exec", body=body)
    if answer.status != 201:
        raise MuxBrokenError(answer.text())
    return _wire.attach_request(answer.json()["Id"])


async def relay_connections(
    address: _wire.EngineAddress, request: bytes, listener: socket.socket, parent: int
) -> None:
    """Start the inner side, and relay connections until the program is done.

    Raises:
        MuxBrokenError: The inner side ended, or violated the protocol.
    """
    loop = asyncio.get_running_loop()
    mux = Attached()
    connection, tls = _wire.connect(address, HELLO_TIMEOUT_S), _wire.tls(address)
    connection.setblocking(False)
    name = None if tls is None else _wire.host(address)
    await loop.create_connection(lambda: mux, sock=connection, ssl=tls, server_hostname=name)
    assert mux.carrier is not None
    mux.carrier.write(request)
    done = asyncio.Event()
    loop.add_reader(0, done.set)
    tasks: list[asyncio.Future[Any]] = [
        mux.ended,
        loop.create_task(done.wait()),
        loop.create_task(mux.greeted.wait()),
    ]
    try:
        await asyncio.wait(tasks, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if mux.greeted.is_set():
            tasks[-1] = loop.create_task(mux.accept(listener))
        elif not done.is_set():
            mux.stop(MuxBrokenError("the inner side did not answer"))
        while os.getppid() == parent and not done.is_set():
            await asyncio.wait(tasks, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks[1:]:
            task.cancel()
        loop.remove_reader(0)
        mux.stop(MuxBrokenError("the relay ends"))
        mux.ended.exception()  # mark as retrieved: possibly nobody awaits it


def main(arguments: list[str]) -> int:
    """Run the outer side until the program is done or dies."""
    fd, parent, url, certificates, verify, container, port = arguments
    address = _wire.EngineAddress(url, certificates or None, verify == "1")
    # Ctrl-C reaches all processes of the terminal; the program decides about its container.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise_descriptor_limit()
    failures = 0
    with socket.socket(fileno=int(fd)) as listener:
        listener.setblocking(False)
        while True:
            begin = time.monotonic()
            try:
                request = prepare(address, container, port)
                asyncio.run(relay_connections(address, request, listener, int(parent)))
                return 0
            except (MuxBrokenError, *_wire.CONNECTION_ERRORS) as error:
                reason = str(error) or type(error).__name__
                is_gone = isinstance(
                    error, (FileNotFoundError, ConnectionRefusedError)
                )  # the engine is not running
            failures = failures + 1 if time.monotonic() - begin < STEADY_UPTIME_S else 0
            if is_gone:
                # Containers may outlive a restart of their engine.
                failures = min(failures, TRIES - 1)
            if "executable file not found" in reason:
                reason = "the image has no python3 in its PATH, which a container without a network needs"
                failures = TRIES
            if failures >= TRIES or os.getppid() != int(parent):
                print(reason, file=sys.stderr)  # noqa: T201
                return 1
            if select.select([0], [], [], 0.05 * 2**failures)[0]:
                return 0


def raise_descriptor_limit() -> None:
    """Raise the limit on descriptors to the maximum number of connections, if the system permits."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = STREAMS + 64
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        asyncio.run(run_inside(int(sys.argv[1])))
    else:
        sys.exit(main(sys.argv[1:]))
