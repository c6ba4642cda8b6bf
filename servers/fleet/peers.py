"""The other workers of a fleet, reached over their private Unix sockets."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.types import Receive, Scope, Send

from openenv_core.protocol import replies
from openenv_core.protocol.codes import SESSION_ERROR
from servers.fleet.exchange import ExchangeFailed, Exchanges, appeared
from servers.security.refusal import Turned, turn_away

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

logger = logging.getLogger("servers")

CONNECT_S: Final = 5.0
MARGIN_S: Final = 15.0
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
        self._reply_s = None if reply_s is None else reply_s + MARGIN_S
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
            async with asyncio.timeout(CONNECT_S):
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
        except ExchangeFailed as failed:
            logger.warning("worker %d did not answer: %s", worker, failed)
            if live.begun:
                await live.end()
                return
            text = f"expected worker {worker}, which holds this session, to answer, got: {failed}; "
            await turn_away(Turned(502, text + "if it died, its sessions are gone: reset"), scope, send)
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
            self._known[worker] = Exchanges(self._path(worker), CONNECT_S, self._reply_s)
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
            open_timeout=CONNECT_S,
            close_timeout=CONNECT_S,
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
