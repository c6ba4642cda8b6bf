"""Connections to the other workers of a fleet over their private Unix sockets."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import httpcore
from starlette.types import Receive, Scope, Send

from openenv_core.protocol import frames
from openenv_core.protocol.batch import SUBPROTOCOL
from openenv_core.protocol.errors import SESSION_ERROR
from openenv_core.protocol.http import DETERMINISTIC_HEADER
from servers.routes.connection import is_break
from servers.routes.http import wait_of, while_connected
from servers.routes.websocket import HANDSHAKE_WAIT_S
from servers.security import HttpRefusalError, send_refusal
from servers.sessions import REQUEST_WAIT_S

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

logger = logging.getLogger("servers")

_CONNECT_TIMEOUT_S: Final = 5.0

_KEEPALIVE_EXPIRY_S: Final = 30.0
"""How long an unused connection is kept: less than the server keeps it, so that the server never closes it first."""

_MIN_SILENCE_TIMEOUT_S: Final = 60.0
"""Least seconds of silence in a response after which its worker is presumed dead; streams send something every 15."""

_DEADLINE_MARGIN_S: Final = 15.0
"""Seconds beyond a step's deadline, so that the worker itself can report that the deadline has passed."""

_MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""Replies come from the environment; clients accept up to 100 MB."""

_HOP_BY_HOP: Final = frozenset(b"connection keep-alive transfer-encoding te upgrade expect date".split())
_HANDSHAKE_HEADERS: Final = (b"host", b"connection", b"upgrade", b"sec-websocket-")

_ABNORMAL: Final = 1006
_NO_CODE: Final = 1005
_INTERNAL_ERROR: Final = 1011
_NORMAL: Final = 1000


class UnixPeers:
    """Forwards connections to the workers of a fleet.

    Args:
        path: Returns the path of a worker's socket.
        reply_s: Seconds that a worker may take to reply, beside a wait for a slot, or between two pieces of a response;
            None: no limit.
    """

    def __init__(self, path: Callable[[int], str], reply_s: float | None) -> None:
        self._path = path
        self._reply_s = None if reply_s is None else reply_s + _DEADLINE_MARGIN_S
        self._pools: dict[int, httpcore.AsyncConnectionPool] = {}

    async def http(self, worker: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request and return its response; the client's disconnection cancels the request."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                await while_connected(receive, self._request(worker, scope, bytes(body), send))
                return

    async def socket(self, worker: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay a WebSocket in both directions until it closes."""
        from websockets.exceptions import InvalidStatus, WebSocketException

        await receive()  # websocket.connect
        try:
            peer = await while_connected(receive, self._connect(worker, scope))
            if peer is None:
                return
        except InvalidStatus as refused:
            response = refused.response
            kind = (b"content-type", response.headers.get("Content-Type", "text/plain").encode())
            head = {"status": response.status_code, "headers": [kind]}
            await send({"type": "websocket.http.response.start", **head})
            await send({"type": "websocket.http.response.body", "body": response.body or b""})
            return
        except (OSError, TimeoutError, WebSocketException) as error:
            await send({"type": "websocket.accept"})
            await _close_broken(worker, error, send)
            return
        try:
            assert peer.response is not None
            value = peer.response.headers.get(DETERMINISTIC_HEADER)
            headers = [] if value is None else [(DETERMINISTIC_HEADER.lower().encode(), value.encode())]
            await send({"type": "websocket.accept", "subprotocol": peer.subprotocol, "headers": headers})
            await _relay(worker, peer, receive, send)
        finally:
            peer.transport.abort()

    async def close_worker(self, worker: int) -> None:
        """Close the connections to a worker that is gone."""
        if (pool := self._pools.pop(worker, None)) is not None:
            await pool.aclose()

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            await pool.aclose()

    async def _request(self, worker: int, scope: Scope, body: bytes, send: Send) -> bool:
        """Forward a request; send its response piece by piece."""
        headers = _without(scope["headers"], _HOP_BY_HOP | {b"content-length"})
        headers.append((b"content-length", str(len(body)).encode()))
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        url = httpcore.URL(scheme=b"http", host=b"worker", port=None, target=target)
        wait_s = wait_of(scope["headers"], REQUEST_WAIT_S)
        started = False
        try:
            async with (
                asyncio.timeout(None if self._reply_s is None else self._reply_s + wait_s) as deadline,
                self._pool(worker).stream(
                    scope["method"],
                    url,
                    headers=headers,
                    content=body,
                    extensions={"timeout": {"connect": _CONNECT_TIMEOUT_S}},
                ) as response,
            ):
                dropped = _HOP_BY_HOP
                if any(name.lower() == b"transfer-encoding" for name, _ in response.headers):
                    dropped |= {b"content-length"}  # beside it a length is void (RFC 9112)
                head = {"status": response.status, "headers": _without(response.headers, dropped)}
                started = True
                await send({"type": "http.response.start", **head})
                async for chunk in response.aiter_stream():
                    deadline.reschedule(None)  # the client may read slowly
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if self._reply_s is not None:
                        silence_s = max(self._reply_s, _MIN_SILENCE_TIMEOUT_S)
                        deadline.reschedule(asyncio.get_running_loop().time() + silence_s)
                await send({"type": "http.response.body", "body": b""})
        except (OSError, TimeoutError, httpcore.NetworkError, httpcore.ProtocolError) as error:
            reason = str(error) or type(error).__name__
            logger.warning("worker %d did not answer: %s", worker, reason)
            if not started:
                text = (
                    f"expected worker {worker}, which holds this session, to answer, got: {reason}; if it died, its "
                    "sessions are gone: reset"
                )
                await send_refusal(HttpRefusalError(502, text), scope, send)
        return True  # if the response is incomplete, the server drops the connection

    def _pool(self, worker: int) -> httpcore.AsyncConnectionPool:
        if worker not in self._pools:
            self._pools[worker] = httpcore.AsyncConnectionPool(
                uds=self._path(worker), max_connections=None, keepalive_expiry=_KEEPALIVE_EXPIRY_S
            )
        return self._pools[worker]

    async def _connect(self, worker: int, scope: Scope) -> "ClientConnection":
        from websockets.asyncio.client import unix_connect

        host = next(value for name, value in scope["headers"] if name.lower() == b"host").decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if not name.lower().startswith(_HANDSHAKE_HEADERS)
        ]
        return await unix_connect(
            self._path(worker),
            uri=f"ws://{host}{target}",
            additional_headers=headers,
            subprotocols=scope.get("subprotocols") or None,
            user_agent_header=None,
            compression=None,
            max_size=_MAX_MESSAGE_BYTES,
            ping_interval=None,  # pings go over the client's own connection
            open_timeout=_CONNECT_TIMEOUT_S + wait_of(scope["headers"], HANDSHAKE_WAIT_S),
            close_timeout=_CONNECT_TIMEOUT_S,
        )


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in names]


async def _relay(worker: int, peer: "ClientConnection", receive: Receive, send: Send) -> None:
    up = asyncio.create_task(_relay_to_worker(peer, receive))
    down = asyncio.create_task(_relay_to_caller(worker, peer, send))
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        if down.done() and down.exception() is not None:
            # The client has left, perhaps in order: without its close, the worker would keep its sessions for a resume.
            await asyncio.wait([up], timeout=_CONNECT_TIMEOUT_S)
    finally:
        for task in (up, down):
            task.cancel()
        outcomes = await asyncio.gather(up, down, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
            raise outcome


async def _relay_to_worker(peer: "ClientConnection", receive: Receive) -> None:
    """Relay the client's messages and its close to the worker."""
    from websockets.exceptions import ConnectionClosed

    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        try:
            await peer.send(message["bytes"] if text is None else text)
        except ConnectionClosed:
            # `_relay_to_caller` closes the client's side.
            await asyncio.get_running_loop().create_future()
    if is_break(message):
        peer.transport.abort()  # the worker must see a break too: it may keep the session for a reconnecting client
    elif message["code"] == _NO_CODE:
        await peer.close()
    else:
        await peer.close(message["code"], message.get("reason") or "")


async def _relay_to_caller(worker: int, peer: "ClientConnection", send: Send) -> None:
    """Relay the worker's messages and its close to the client."""
    from websockets.exceptions import ConnectionClosed

    try:
        while True:
            frame = await peer.recv()
            await send({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})
    except ConnectionClosed as closed:
        if peer.close_code in (None, _ABNORMAL):
            # A reconnecting client learns that the session is gone; an error frame would look like the environment's.
            await _close_broken(worker, closed, send, silent=peer.subprotocol == SUBPROTOCOL)
        else:
            code = _NORMAL if peer.close_code == _NO_CODE else peer.close_code
            await send({"type": "websocket.close", "code": code, "reason": peer.close_reason or ""})


async def _close_broken(worker: int, error: Exception, send: Send, *, silent: bool = False) -> None:
    logger.warning("a connection to worker %d broke: %s", worker, type(error).__name__)
    text = f"worker {worker}, which held this session, does not answer; its sessions are gone"
    if not silent:
        await send({"type": "websocket.send", "text": frames.encode_error(SESSION_ERROR, text)})
    await send({"type": "websocket.close", "code": _INTERNAL_ERROR})
