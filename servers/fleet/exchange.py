"""One HTTP exchange with a neighbour over a Unix socket, on connections that are kept.

A general client costs three times what the neighbour takes to answer; this one knows that bodies are whole, unless
they are streams of events, and that the other side is a server of ours.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import h11

IDLE_S: Final = 30.0
"""How long a connection is kept unused; less than the server's side keeps it, which therefore never closes it."""

APPEARS_S: Final = 0.02
"""Pause between two looks for a neighbour that starts."""

STREAM_S: Final = 60.0
"""Seconds without anything on a stream after which its other side is taken for dead; it says something every 15."""

_READ_BYTES: Final = 65_536


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Live(Protocol):
    """Takes an answer that is a stream of events, as it comes."""

    async def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take its beginning."""

    async def part(self, data: bytes) -> None:
        """Take what comes next of it."""


class ExchangeFailed(Exception):  # noqa: N818 - what happened
    """The neighbour could not be reached, or ended before it had answered."""


class _Line:
    """One connection, good for one exchange after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    async def exchange(
        self, request: h11.Request, body: bytes, live: Live | None, deadline: asyncio.Timeout
    ) -> Answer | None:
        http = self._http
        head = http.send(request) or b""
        content = http.send(h11.Data(data=body)) or b"" if body else b""
        http.send(h11.EndOfMessage())
        self._writer.write(head + content)
        response: Any = None
        streams = False
        parts: list[bytes] = []
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                response = event
                if live is not None and _is_stream(event):
                    streams = True
                    await live.head(event.status_code, list(event.headers))
            elif streams and isinstance(event, h11.Data):
                assert live is not None
                if deadline.when() is not None:
                    deadline.reschedule(asyncio.get_running_loop().time() + STREAM_S)
                await live.part(bytes(event.data))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return (
                    None if streams else Answer(response.status_code, list(response.headers), b"".join(parts))
                )
            elif not isinstance(event, h11.InformationalResponse):
                raise ExchangeFailed("the connection ended")

    def reusable(self) -> bool:
        """Say whether another exchange can follow, and make ready for it."""
        http = self._http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    def fresh(self, now: float) -> bool:
        return now - self.idle_since < IDLE_S and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.transport.abort()


class Exchanges:
    """Exchanges with one neighbour.

    Args:
        path: Of its socket.
        connect_s: Seconds that a connection may take.
        reply_s: Seconds that an answer may take; None: for ever.
    """

    def __init__(self, path: str, connect_s: float, reply_s: float | None) -> None:
        self._path = path
        self._connect_s = connect_s
        self._reply_s = reply_s
        self._idle: list[_Line] = []

    async def exchange(
        self,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        live: Live | None = None,
    ) -> Answer | None:
        """Send a request and return its answer; None where that was a stream, which `live` has taken.

        Raises:
            ExchangeFailed: There is none.
        """
        try:
            line = await self._line()
        except (OSError, TimeoutError) as error:
            raise ExchangeFailed(str(error) or type(error).__name__) from error
        try:
            async with asyncio.timeout(self._reply_s) as deadline:
                request = h11.Request(method=method, target=target, headers=list(headers))
                answer = await line.exchange(request, body, live, deadline)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            line.close()
            raise ExchangeFailed(str(error) or type(error).__name__) from error
        except BaseException:
            line.close()  # the caller left: the neighbour sees it too
            raise
        if line.reusable():
            line.idle_since = asyncio.get_running_loop().time()
            self._idle.append(line)
        else:
            line.close()
        return answer

    def close(self) -> None:
        """Let go of all connections."""
        while self._idle:
            self._idle.pop().close()

    async def _line(self) -> _Line:
        now = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()  # the one used last
            if line.fresh(now):
                return line
            line.close()
        async with asyncio.timeout(self._connect_s):
            await appeared(self._path)
            return _Line(*await asyncio.open_unix_connection(self._path))


def _is_stream(response: h11.Response) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream") for name, value in response.headers
    )


async def appeared(path: str) -> None:
    """Wait, for ever, for a neighbour that starts later than this one: its socket is not there yet.

    That of a neighbour that died is: connections to it are refused.
    """
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240 - the kernel answers at once, and tells nobody of it
        await asyncio.sleep(APPEARS_S)
