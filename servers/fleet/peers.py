"""The other workers of a fleet, reached over their private Unix sockets."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import h11
from starlette.types import Receive, Scope, Send

from openenv_core.protocol import replies
from openenv_core.protocol.errors import SESSION_ERROR
from servers.security import TurnedAwayError, turn_away

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

KEEPALIVE_EXPIRY_S: Final = 30.0
"""How long a connection is kept unused; less than the server's side keeps it, which therefore never closes it."""

START_POLL_INTERVAL_S: Final = 0.02
"""Pause between two looks for a neighbour that starts."""

STREAM_SILENCE_TIMEOUT_S: Final = 60.0
"""Seconds without anything on a stream after which its other side is taken for dead; it says something every 15."""

_READ_BYTES: Final = 65_536


class PeerResponse(NamedTuple):
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


class ExchangeError(Exception):
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
    ) -> PeerResponse | None:
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
                    deadline.reschedule(asyncio.get_running_loop().time() + STREAM_SILENCE_TIMEOUT_S)
                await live.part(bytes(event.data))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return (
                    None
                    if streams
                    else PeerResponse(response.status_code, list(response.headers), b"".join(parts))
                )
            elif not isinstance(event, h11.InformationalResponse):
                raise ExchangeError("the connection ended")

    def reusable(self) -> bool:
        """Say whether another exchange can follow, and make ready for it."""
        http = self._http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    def fresh(self, now: float) -> bool:
        return now - self.idle_since < KEEPALIVE_EXPIRY_S and not self._reader.at_eof()

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
    ) -> PeerResponse | None:
        """Send a request and return its answer; None where that was a stream, which `live` has taken.

        Raises:
            ExchangeError: There is none.
        """
        try:
            line = await self._line()
        except (OSError, TimeoutError) as error:
            raise ExchangeError(str(error) or type(error).__name__) from error
        try:
            async with asyncio.timeout(self._reply_s) as deadline:
                request = h11.Request(method=method, target=target, headers=list(headers))
                answer = await line.exchange(request, body, live, deadline)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            line.close()
            raise ExchangeError(str(error) or type(error).__name__) from error
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
        await asyncio.sleep(START_POLL_INTERVAL_S)


logger = logging.getLogger("servers")

CONNECT_TIMEOUT_S: Final = 5.0
DEADLINE_MARGIN_S: Final = 15.0
"""What a worker gets beyond the time that a step may take, to say itself that the time is over."""

MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Replies are the environment's own, and clients take up to 100 MB."""

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"content-length",
        b"te",
        b"upgrade",
        b"expect",
        b"date",
    )
)
_OF_HANDSHAKE: Final = (b"host", b"connection", b"upgrade", b"sec-websocket-")

_ABNORMAL: Final = 1006
_NO_CODE: Final = 1005
_INTERNAL_ERROR: Final = 1011
_NORMAL: Final = 1000


class UnixPeers:
    """Passes connections on to the workers of a fleet.

    Args:
        path: Returns the path of a worker's socket.
        reply_s: Seconds that a worker may take over a request; None: for ever.
    """

    def __init__(self, path: Callable[[int], str], reply_s: float | None) -> None:
        self._path = path
        self._reply_s = None if reply_s is None else reply_s + DEADLINE_MARGIN_S
        self._known: dict[int, Exchanges] = {}

    async def http(self, worker: int, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass on a request, and its response back; a caller that leaves takes its request along."""
        work = asyncio.create_task(self._request(worker, scope, body, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait([work, gone])
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def socket(self, worker: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a WebSocket, in both ways, until it closes."""
        from websockets.exceptions import InvalidStatus, WebSocketException

        await receive()  # websocket.connect
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await appeared(self._path(worker))
            peer = await self._connect(worker, scope)
        except InvalidStatus as refused:
            await _pass_refusal(refused, send)
            return
        except (OSError, TimeoutError, WebSocketException) as error:
            await send({"type": "websocket.accept"})
            await _lost(worker, error, send)
            return
        try:
            await send({"type": "websocket.accept", "subprotocol": peer.subprotocol})
            await _relay(worker, peer, receive, send)
        finally:
            peer.transport.abort()

    async def close(self) -> None:
        """Let go of all connections."""
        for exchanges in self._known.values():
            exchanges.close()

    async def _request(self, worker: int, scope: Scope, body: bytes, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        headers.append((b"content-length", str(len(body)).encode()))
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        live = _Live(send)
        try:
            answer = await self._exchanges(worker).exchange(scope["method"], target, headers, body, live)
        except ExchangeError as failed:
            logger.warning("worker %d did not answer: %s", worker, failed)
            if live.begun:
                await live.end()
                return
            text = f"expected worker {worker}, which holds this session, to answer, got: {failed}; "
            await turn_away(
                TurnedAwayError(502, text + "if it died, its sessions are gone: reset"), scope, send
            )
            return
        if answer is None:
            await live.end()
            return
        kept = _kept(answer.headers)
        kept.append((b"content-length", str(len(answer.body)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": kept})
        await send({"type": "http.response.body", "body": answer.body})

    def _exchanges(self, worker: int) -> Exchanges:
        if worker not in self._known:
            self._known[worker] = Exchanges(self._path(worker), CONNECT_TIMEOUT_S, self._reply_s)
        return self._known[worker]

    async def _connect(self, worker: int, scope: Scope) -> "ClientConnection":
        from websockets.asyncio.client import unix_connect

        host = next(value for name, value in scope["headers"] if name.lower() == b"host").decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if not name.lower().startswith(_OF_HANDSHAKE)
        ]
        return await unix_connect(
            self._path(worker),
            uri=f"ws://{host}{target}",
            additional_headers=headers,
            subprotocols=scope.get("subprotocols") or None,
            user_agent_header=None,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            ping_interval=None,  # the callers' own connections are watched
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=CONNECT_TIMEOUT_S,
        )


class _Live:
    """Passes on a stream of events.

    Attributes:
        begun: The caller has seen its beginning. Where the worker dies then, the stream ends, and the caller misses
            what it waits for.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": _kept(headers)})

    async def part(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


def _kept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay(worker: int, peer: "ClientConnection", receive: Receive, send: Send) -> None:
    up = asyncio.create_task(_upwards(peer, receive))
    down = asyncio.create_task(_downwards(worker, peer, send))
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.wait([up, down])
    for task in (up, down):
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not isinstance(error, OSError)
        ):
            raise error


async def _upwards(peer: "ClientConnection", receive: Receive) -> None:
    """Pass on what the caller sends, and its close."""
    from websockets.exceptions import ConnectionClosed

    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        try:
            await peer.send(message["bytes"] if text is None else text)
        except ConnectionClosed:
            # The other direction tells the caller.
            await asyncio.get_running_loop().create_future()
    code = message.get("code") or _NORMAL
    if code not in (_NO_CODE, _ABNORMAL):
        await peer.close(code, message.get("reason") or "")
    elif code == _NO_CODE:
        await peer.close()


async def _downwards(worker: int, peer: "ClientConnection", send: Send) -> None:
    """Pass on what the worker sends, and its close."""
    from websockets.exceptions import ConnectionClosed

    try:
        while True:
            frame = await peer.recv()
            if isinstance(frame, str):
                await send({"type": "websocket.send", "text": frame})
            else:
                await send({"type": "websocket.send", "bytes": frame})
    except ConnectionClosed as closed:
        if peer.close_code in (None, _ABNORMAL):
            await _lost(worker, closed, send)
        else:
            code = _NORMAL if peer.close_code == _NO_CODE else peer.close_code
            await send({"type": "websocket.close", "code": code, "reason": peer.close_reason or ""})


async def _lost(worker: int, error: Exception, send: Send) -> None:
    logger.warning("worker %d was lost: %s", worker, type(error).__name__)
    text = f"expected worker {worker}, which holds this session, to be there, got none; its sessions are gone"
    await send({"type": "websocket.send", "text": replies.encode_error(SESSION_ERROR, text)})
    await send({"type": "websocket.close", "code": _INTERNAL_ERROR})


async def _pass_refusal(refused: object, send: Send) -> None:
    from websockets.exceptions import InvalidStatus

    assert isinstance(refused, InvalidStatus)
    response = refused.response
    headers = [(b"content-type", response.headers.get("Content-Type", "text/plain").encode())]
    await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": response.body or b""})
