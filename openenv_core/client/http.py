"""Transport of a session over plain HTTP, with `httpx`.

For servers without WebSockets (0.1) and networks that block them. The client chooses the id of its session; servers
of 0.1 share one session among all clients and ignore the id.
"""

import asyncio
import socket
import sys
from collections import deque
from typing import Final
from uuid import uuid4

import httpx

from openenv_core.client.carrier import Carrier, refusal, unreachable_error
from openenv_core.client.settings import ClientSettings
from openenv_core.errors import (
    ClientError,
    ConfigurationError,
    ConnectionLostError,
    ProtocolError,
)
from openenv_core.protocol.frames import (
    HttpRequest,
    detail_text,
    encode_error,
    encode_request,
    error_frame,
    http_request,
    is_from_server,
    reply_frame,
)
from openenv_core.protocol.http import (
    DETERMINISTIC,
    DETERMINISTIC_HEADER,
    SESSION_HEADER,
    redact_url,
    retry_after,
)
from openenv_core.proxies import proxy_for, tls_context
from openenv_core.tracing import current_traceparent, tracer

KEEPALIVE_EXPIRY_S: Final = 2.0
"""Seconds for which an idle connection is reused. Servers close theirs after 5 s, which must not cross a request."""


class HttpCarrier(Carrier):
    """One session over HTTP: requests run one after another, and each response is delivered as a frame."""

    def __init__(self, base_url: str, session_id: str | None, settings: ClientSettings) -> None:
        super().__init__()
        self._client = _make_client(base_url, settings)
        self._base_url = base_url
        self._session_id = session_id or str(uuid4())
        self._owns_session = session_id is None
        self._session_may_exist = False  # on the server, opened by this carrier
        self._settings = settings
        self._max_message_bytes = settings.max_message_bytes
        self._stateful = False  # later requests reach the same environment
        self._frames: deque[bytes] = deque()
        self._sender: asyncio.Task[None] | None = None  # while there are frames
        self._ending: asyncio.Task[None] | None = None

    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send one frame after the reply to the previous one."""
        self._frames.append(frame)
        if self._sender is None and self._lost_error is None:
            self._sender = self._loop.create_task(self._answer_frames())

    async def close(self) -> None:
        """Cancel requests in progress, and wait until the session has ended and the connection is closed."""
        self.abort()
        if tasks := [task for task in (self._sender, self._ending) if task is not None]:
            await asyncio.wait(tasks)

    def abort(self) -> None:
        """Cancel requests in progress, and begin to end the session and close the connection."""
        self._mark_lost(ConnectionLostError("the connection was closed by this client"))
        if self._sender is not None:
            self._sender.cancel()
        if self._ending is None:
            self._ending = self._loop.create_task(self._end_session())

    async def probe(self) -> None:
        """Check that the server answers and accepts this client.

        Raises:
            ClientError: It does not answer, or refuses this client.
        """
        status, headers, body = await self._send(HttpRequest("health", "GET", "/health"))
        if status >= 300 and status not in (404, 405, 501):  # from a server without /health
            raise refusal(self._base_url, status, headers, detail_text(body), socket=False)
        self.deterministic = headers.get(DETERMINISTIC_HEADER) == DETERMINISTIC

    async def _answer_frames(self) -> None:
        try:
            while self._frames:
                request = http_request(self._frames.popleft(), self._session_id, self._has_session)
                self._session_may_exist = self._owns_session
                self._on_frame(await self._exchange(request))
        except ClientError as error:
            self._mark_lost(error)
        finally:
            self._sender = None

    @property
    def _has_session(self) -> bool:
        """Whether the session exists on the server."""
        return self._stateful or not self._owns_session

    async def _exchange(self, request: HttpRequest) -> bytes:
        had_session = self._has_session
        status, headers, body = await self._send(request)
        if status == 200:
            if not self._stateful and request.kind in ("reset", "step"):
                await self._require_state(SESSION_HEADER.lower() in headers)
            return reply_frame(request.kind, body)
        if status in (429, 502, 503) and had_session and not is_from_server(body):
            text = f"something between here and the session answered with HTTP {status}: {detail_text(body)[:300]}"
            return encode_error(
                f"HTTP_{status}",
                f"{text}; the session lives, and the request may or may not have reached it",
                {"retry_after_s": retry_after(headers.get("retry-after"))},
            ).encode()
        if status == 404 and self._stateful and self._owns_session and request.kind != "reset":
            raise ConnectionLostError(
                f"expected the server to know the session that it has made, got: {detail_text(body)[:300]}; it was "
                "restarted, or the session was idle for too long; call reset() to start a new session"
            )
        if not (status == 404 and request.kind == "reset"):  # a 404 to a reset: no such route
            frame = error_frame(status, body, retry_after(headers.get("retry-after")))
            if frame is not None:
                return frame
        raise refusal(self._base_url + request.path, status, headers, detail_text(body), socket=False)

    async def _require_state(self, names_session: bool) -> None:
        """Check that later requests will reach the same environment.

        Our servers name the session. Servers of 0.1 have one environment. Later releases create one for each request
        and discard it, which would look like an episode without being one; only they have /schema.
        """
        if not names_session:
            status, _, _ = await self._send(HttpRequest("schema", "GET", "/schema"))
            if status == 200:
                raise ProtocolError(
                    f"expected {redact_url(self._base_url)} to keep a session over plain HTTP, got a server that makes "
                    'a new environment for each request; use transport="websocket"'
                )
        self._stateful = True

    async def _end_session(self) -> None:
        """End the session, if the server has a route for that, and close the connection."""
        try:
            if self._session_may_exist:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await self._send(http_request(encode_request("close"), self._session_id))
                self._session_may_exist = False
        except (ClientError, TimeoutError):
            pass  # the server is gone, or ends the session once it is idle for too long
        finally:
            await self._client.aclose()

    async def _send(self, request: HttpRequest) -> tuple[int, httpx.Headers, bytes]:
        headers = {} if request.is_sessionless else {SESSION_HEADER: self._session_id}
        if tracer() is not None and (parent := current_traceparent()) is not None:
            headers["traceparent"] = parent
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        limit = self._max_message_bytes
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
            raise unreachable_error(self._base_url, error) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionLostError(
                f"expected a reply, but the connection is closed ({error or type(error).__name__}); "
                "call reset() to start a new session"
            ) from None
        if response.status_code >= 500:
            # Many servers close the connection after a failure; do not send the next request on it.
            failed_client, self._client = self._client, _make_client(self._base_url, self._settings)
            await failed_client.aclose()
        return response.status_code, response.headers, bytes(body)


async def open_http(base_url: str, session_id: str | None, settings: ClientSettings) -> HttpCarrier:
    """Return a carrier to a server, after checking that it answers.

    Args:
        base_url: http:// or https://, without a trailing slash.
        session_id: Id of a standing session; None for a session that the carrier owns.
        settings: Settings of the client.

    Raises:
        ClientError: As `open_socket`; CapacityError also if a proxy before the server answers 429 or 503.
    """
    carrier = HttpCarrier(base_url, session_id, settings)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            await carrier.probe()
    except BaseException as error:
        await carrier.close()
        if isinstance(error, TimeoutError):
            raise unreachable_error(base_url, f"no answer within {settings.connect_timeout_s:g} s") from error
        raise
    return carrier


def _make_client(base_url: str, settings: ClientSettings) -> httpx.AsyncClient:
    try:
        transport = httpx.AsyncHTTPTransport(
            verify=tls_context(),
            proxy=proxy_for(base_url),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_EXPIRY_S),
            socket_options=_keepalive_options(settings),
        )
    except ImportError as error:
        raise ConfigurationError(f"expected to use the proxy of the environment, got: {error}") from error
    return httpx.AsyncClient(
        transport=transport,
        headers=settings.request_headers,
        # No read timeout: the conversation has a deadline for each request.
        timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
        follow_redirects=False,  # a redirect could send the token to another host
    )


def _keepalive_options(settings: ClientSettings) -> list[tuple[int, int, int]]:
    """Return socket options for TCP keepalive, which detects a dead server as pings do on a WebSocket."""
    if settings.websocket_ping_interval_s is None:
        return []
    socket_options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        probes = 3  # unanswered ones until the connection is lost
        timeout_s = settings.websocket_ping_timeout_s or settings.websocket_ping_interval_s
        socket_options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(settings.websocket_ping_interval_s))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timeout_s / probes))),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        ]
    return socket_options
