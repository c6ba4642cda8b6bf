"""A session's frames over plain HTTP, by the `httpx` library.

For servers that have no WebSocket (0.1), and for networks that let none through. The server is asked for one
session by an id that this client chooses; servers of 0.1 have one session for everybody and ignore it.
"""

import asyncio
import socket
import ssl
import sys
from collections.abc import Coroutine
from functools import cache
from typing import Any, Final
from uuid import uuid4

import httpx

from openenv_core.client.carrier import Carrier, CarrierOptions, refusal, unreachable
from openenv_core.errors import (
    ClientError,
    ConfigurationError,
    ConnectionLostError,
    ProtocolError,
)
from openenv_core.protocol.http import (
    DETERMINISTIC,
    DETERMINISTIC_HEADER,
    SESSION_HEADER,
    HttpRequest,
    detail_text,
    error_frame,
    http_request,
    redact_url,
    reply_frame,
    retry_after,
    said_by_server,
)
from openenv_core.protocol.replies import encode_error
from openenv_core.protocol.requests import encode_request
from openenv_core.proxies import proxy_for
from openenv_core.tracing import current_traceparent

KEEPALIVE_EXPIRY_S: Final = 2.0
"""Seconds that an idle connection is used again. Servers close them after 5, and a request must not cross that."""


class HttpCarrier(Carrier):
    """One session over HTTP: requests one after another, each answered by a frame in the inbox."""

    def __init__(self, base_url: str, session_id: str | None, options: CarrierOptions) -> None:
        super().__init__()
        self._client = _client(base_url, options)
        self._base_url = base_url
        self._session_id = session_id or str(uuid4())
        self._own = session_id is None
        self._may_hold_session = False  # the server may hold a session of this carrier's own
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_task: asyncio.Task[None] | None = None
        self._stateful = False  # the next request meets the same environment
        self._ended = False

    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send one frame, when the answer to the one before is there."""
        if self._lost is not None:
            return
        request = http_request(frame, self._session_id, self._has_session)
        if request.kind == "close":
            self.abort()
            return
        self._may_hold_session = self._own
        self._last_task = self._start_task(self._answer_request(request, self._last_task))

    async def close(self) -> None:
        """Break off what is under way, and wait until session and connection are given back."""
        self.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def abort(self) -> None:
        """Break off what is under way, and begin to give session and connection back."""
        self._lose(ConnectionLostError("the connection was closed by this client"))
        if self._ended:
            return
        self._ended = True
        for task in self._tasks:
            task.cancel()
        self._start_task(self._end_session())

    def orphan(self) -> None:
        """Begin to give the session back on the running event loop: no end of a connection tells the server."""
        self._loop, self._listener = asyncio.get_running_loop(), None
        self._tasks.clear()
        # The former's connections belong to the former loop.
        self._client = _client(self._base_url, self._options)
        self._ended = False
        self.abort()

    async def probe(self) -> None:
        """Find out whether a server is there that lets this client in.

        Raises:
            ClientError: There is none, or it does not.
        """
        status, headers, body = await self._send(HttpRequest("health", "GET", "/health"))
        if status >= 300 and status not in (404, 405, 501):  # those are of a server without /health
            raise refusal(self._base_url, status, headers, detail_text(body), socket=False)
        self.deterministic = headers.get(DETERMINISTIC_HEADER) == DETERMINISTIC

    async def _answer_request(self, request: HttpRequest, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait({before})
        if self._lost is not None:
            return
        try:
            self._deliver(await self._exchange(request))
        except ClientError as error:
            self._lose(error)

    @property
    def _has_session(self) -> bool:
        """Whether the server has the session."""
        return self._stateful or not self._own

    async def _exchange(self, request: HttpRequest) -> bytes:
        had_session = self._has_session
        status, headers, body = await self._send(request)
        if status == 200:
            if not self._stateful and request.kind in ("reset", "step"):
                await self._require_state(SESSION_HEADER.lower() in headers)
            return reply_frame(request, body)
        if status in (429, 502, 503) and had_session and not said_by_server(body):
            text = f"something between here and the session answered with HTTP {status}: {detail_text(body)[:300]}"
            return encode_error(
                f"HTTP_{status}",
                f"{text}; the session lives, and whether it was asked nobody knows",
                {"retry_after_s": retry_after(headers.get("retry-after"))},
            ).encode()
        if status == 404 and self._stateful and self._own and request.kind != "reset":
            raise ConnectionLostError(
                f"expected the server to know the session that it has made, got: {detail_text(body)[:300]}; it was "
                "started anew, or the session was idle for too long; call reset() to start a new session"
            )
        if not (status == 404 and request.kind == "reset"):  # no route at all, where a session would be made
            frame = error_frame(status, body, retry_after(headers.get("retry-after")))
            if frame is not None:
                return frame
        raise refusal(self._base_url + request.path, status, headers, detail_text(body), socket=False)

    async def _require_state(self, named: bool) -> None:
        """Make sure that the next request meets the same environment.

        Our servers name the session. Those of 0.1 have one environment; the releases after it make one for each
        request and throw it away, which would look like an episode and be none. Only they have /schema.
        """
        if not named:
            status, _, _ = await self._send(HttpRequest("schema", "GET", "/schema"))
            if status == 200:
                raise ProtocolError(
                    f"expected {redact_url(self._base_url)} to keep a session over plain HTTP, got a server that makes "
                    'a new environment for each request; use transport="websocket"'
                )
        self._stateful = True

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_session(self) -> None:
        """End the session at the server, where it has a way to do so, and let the connection go."""
        try:
            if self._may_hold_session:
                async with asyncio.timeout(self._options.connect_timeout_s):
                    await self._send(http_request(encode_request("close"), self._session_id))
                self._may_hold_session = False
        except (ClientError, TimeoutError):
            pass  # it is gone, or lets the session go after a time by itself
        finally:
            await self._client.aclose()

    async def _send(self, request: HttpRequest) -> tuple[int, httpx.Headers, bytes]:
        headers = {} if request.is_sessionless else {SESSION_HEADER: self._session_id}
        if (parent := current_traceparent()) is not None:
            headers["traceparent"] = parent
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        limit = self._options.max_message_bytes
        body = bytearray()
        try:
            async with self._client.stream(
                request.method, self._base_url + request.path, content=request.body, headers=headers
            ) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > limit:
                        raise ProtocolError(
                            f"expected a reply of at most {limit} bytes, got more; raise max_message_size_mb"
                        )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(self._base_url, error) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionLostError(
                f"expected a reply, but the connection is closed ({error or type(error).__name__}); "
                "call reset() to start a new session"
            ) from None
        if response.status_code >= 500:
            # Many servers close the connection after a failure; the next request must not meet that.
            spent, self._client = self._client, _client(self._base_url, self._options)
            await spent.aclose()
        return response.status_code, response.headers, bytes(body)


async def open_http(base_url: str, session_id: str | None, options: CarrierOptions) -> HttpCarrier:
    """Return a carrier to a server that has answered.

    Args:
        base_url: http:// or https://, without a slash at its end.
        session_id: A standing session; None for one of this carrier's own.
        options: How the connection is made and kept.

    Raises:
        AuthenticationError: The server asks for a token, or for another one.
        AccessRefusedError: The server refuses the host name or the origin.
        CapacityError: The server takes nobody for now.
        ConnectionFailedError: Nothing answered there in time.
    """
    carrier = HttpCarrier(base_url, session_id, options)
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            await carrier.probe()
    except BaseException as error:
        await carrier.close()
        if isinstance(error, TimeoutError):
            raise unreachable(base_url, f"no answer within {options.connect_timeout_s:g} s") from error
        raise
    return carrier


def _client(base_url: str, options: CarrierOptions) -> httpx.AsyncClient:
    try:
        transport = httpx.AsyncHTTPTransport(
            verify=_trust(),
            proxy=proxy_for(base_url),
            socket_options=_keepalive(options),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_EXPIRY_S),
        )
    except ImportError as error:
        raise ConfigurationError(f"expected to use the proxy of the environment, got: {error}") from error
    return httpx.AsyncClient(
        transport=transport,
        headers={"Prefer": options.prefer, **options.headers},
        # A step may take as long as it takes: the session has a deadline of its own for each request.
        timeout=httpx.Timeout(None, connect=options.connect_timeout_s),
        follow_redirects=False,  # a redirect may lead to somebody who must not get the token
    )


@cache
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _keepalive(options: CarrierOptions) -> list[tuple[int, int, int]]:
    """Let the kernel do what pings do on a WebSocket: find out that a silent server is gone."""
    if options.ping_interval_s is None:
        return []
    options_of_socket = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        probes = 3  # that may stay unanswered
        timeout_s = options.ping_timeout_s or options.ping_interval_s
        options_of_socket += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(options.ping_interval_s))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timeout_s / probes))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        ]
    return options_of_socket
