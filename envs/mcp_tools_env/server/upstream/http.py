"""The wire to a tool server at a URL: the SDK's streamable HTTP, over connections pinned to checked addresses."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, Final

import httpcore2
import httpx2
from mcp.client.streamable_http import streamable_http_client

from .addresses import Resolve, resolve, resolve_checked
from .errors import AddressRefusedError, FirstFailure, UpstreamWire, describe_error
from .schemas import MessageThrottle

MAX_BODY_BYTES: Final = 16 << 20
"""The maximum size of a response, or of one event in a stream of events."""

GET_INTERVAL_S: Final = 1.0
GETS_AT_ONCE: Final = 5
"""How many times in a row a stream of events may be reopened before reopening is throttled."""

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 3700.0
"""The read timeout of the stream of events that no call waits for."""


def make_http_wire(
    url: str, headers: Mapping[str, str], *, allow_private: bool, silence_s: float = READ_TIMEOUT_S
) -> UpstreamWire:
    """Return the wire to a server at a URL, without connecting yet.

    Args:
        url: The MCP endpoint.
        headers: The headers of every request.
        allow_private: Whether the address may be a private one.
        silence_s: How long the response to a call may be silent before its connection is closed. Longer than the
            timeout of a call, after which the SDK tells the server to stop, but leaves the request open.
    """
    fault = FirstFailure()
    transport = _PinnedTransport(fault, allow_private=allow_private, silence_s=silence_s)
    return UpstreamWire(_open_streams(url, dict(headers), transport), fault)


@asynccontextmanager
async def _open_streams(
    url: str, headers: dict[str, str], transport: "_PinnedTransport"
) -> AsyncIterator[Any]:
    timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    async with (
        httpx2.AsyncClient(transport=transport, headers=headers, timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_BODY_BYTES) as streams,
    ):
        yield streams


class _PinnedTransport(httpx2.AsyncHTTPTransport):
    """A transport that connects only to checked addresses, and rejects redirects and compressed responses.

    `fault` records why a response cannot be used.
    """

    def __init__(self, fault: FirstFailure, *, allow_private: bool, silence_s: float) -> None:
        super().__init__(verify=_make_ssl_context())
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_make_ssl_context(),
            max_connections=16,
            keepalive_expiry=5.0,
            network_backend=_PinnedBackend(allow_private=allow_private),
        )
        self._fault = fault
        self._silence_s = silence_s
        self._next_get = float("-inf")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a rejected response is turned into an error response."""
        # A compressed body could be far larger than the bytes that are counted.
        request.headers["accept-encoding"] = "identity"
        if request.method == "POST":
            if json.loads(request.content).get("method") == "tools/call":
                request.extensions["timeout"] = {**request.extensions["timeout"], "read": self._silence_s}
            return await self._send_request(request, self._fault)
        await self._throttle_get(request)
        return await self._send_request(request, FirstFailure())  # no call waits for it

    async def _throttle_get(self, request: httpx2.Request) -> None:
        """Space out requests for a stream of events: a server may end each at once and demand an immediate retry."""
        if request.method == "GET":
            now = time.monotonic()
            send_at = max(self._next_get, now - (GETS_AT_ONCE - 1) * GET_INTERVAL_S)
            self._next_get = send_at + GET_INTERVAL_S
            await asyncio.sleep(max(0.0, send_at - now))

    async def _send_request(self, request: httpx2.Request, fault: FirstFailure) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except AddressRefusedError as error:
            fault.note(describe_error(error))
            raise httpx2.ConnectError(str(error)) from error
        except httpx2.ReadTimeout:
            raise  # no call waits for it any more
        except httpx2.TransportError as error:
            fault.note(f"it cannot be reached: {describe_error(error)}")
            raise
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(
            response.stream,
            fault,
            # In a stream of events, the SDK limits the size of each event.
            events=response.headers.get("content-type", "").startswith("text/event-stream"),
        )
        if response.is_redirect:
            return await _make_refusal(
                response, fault, "it redirects, which is not followed; configure where it is"
            )
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            return await _make_refusal(response, fault, "it packs its answers though it was asked not to")
        if response.status_code >= 500 or response.status_code in (401, 403, 407, 429):
            fault.note(f"it answered with HTTP {response.status_code}")
        return response


class _PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were resolved once, by `look_up`, and checked."""

    def __init__(
        self,
        *,
        allow_private: bool,
        look_up: Resolve = resolve,
        inner: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._look_up = look_up
        self._inner = inner or httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first of a host's addresses that works, after checking all of them."""
        addresses = await resolve_checked(
            host, port, allow_private=self._allow_private, look_up=self._look_up
        )
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        """Reject Unix sockets: a server's address is a host and a port."""
        raise AddressRefusedError("expected a host and a port, got the path of a socket")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _BoundedStream(httpx2.AsyncByteStream):
    """A response body that fails if it becomes too long, and is read no faster than messages are taken."""

    def __init__(self, stream: httpx2.AsyncByteStream, fault: FirstFailure, *, events: bool) -> None:
        self._stream = stream
        self._fault = fault
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length, throttle = 0, MessageThrottle()
        try:
            async for chunk in self._stream:
                length += len(chunk)
                if self._events:
                    await throttle.wait(chunk.count(b"data:"))
                elif length > MAX_BODY_BYTES:
                    message = f"it answered with more than {MAX_BODY_BYTES} bytes, which is the most here"
                    self._fault.note(message)
                    raise httpx2.StreamError(message)
                yield chunk
        except httpx2.ReadTimeout as error:
            # The SDK would try to resume the stream, except after an SSEError.
            kind = httpx2.SSEError if self._events else httpx2.StreamError
            raise kind("no call waits for it any more") from error

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _make_refusal(response: httpx2.Response, fault: FirstFailure, reason: str) -> httpx2.Response:
    """Replace a response by an error response, which fails the request but not the connection."""
    await response.aclose()
    fault.note(reason)
    return _make_error_response(reason)


def _make_error_response(reason: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": reason}}
    return httpx2.Response(
        502, headers={"content-type": "application/json"}, content=json.dumps(body).encode()
    )


@lru_cache(maxsize=1)
def _make_ssl_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context()
