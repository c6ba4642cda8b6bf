"""HTTP to a Docker engine over its socket, with the standard library only.

The sweeper and the relay are run by their paths and import this file from their folder, so that they start in a few
milliseconds without the package's imports.
"""

import http.client
import json
import os
import socket
import ssl
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

CONNECTION_ERRORS = (OSError, http.client.HTTPException, ValueError)
"""Exceptions of a call to an engine that is down or misbehaves."""

ANSWER_BYTES = 64 * 2**20
"""Maximum size of a response."""


class EngineAddress(NamedTuple):
    """The address of a Docker engine.

    Attributes:
        url: unix:///path or tcp://host:port.
        certificates: Folder with ca.pem, cert.pem and key.pem; None for no TLS.
        verify: Whether to verify the engine's certificate.
    """

    url: str
    certificates: str | None = None
    verify: bool = True


class EngineResponse(NamedTuple):
    """A response of the engine."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON; None if it is empty. Raises ValueError for invalid JSON."""
        return json.loads(self.body) if self.body.strip() else None

    def text(self) -> str:
        """Return the engine's message, or else the body."""
        try:
            return str(self.json()["message"])
        except (ValueError, KeyError, TypeError):
            return self.body[:1000].decode(errors="replace").strip()


def connect(address: EngineAddress, timeout_s: float) -> socket.socket:
    """Open a connection to the engine, without the TLS handshake that `tls` may require.

    Raises:
        OSError: The connection failed.
    """
    parts = urlsplit(address.url)
    if parts.scheme != "unix":
        return socket.create_connection((host(address), parts.port or 2375), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(parts.path)
    except BaseException:
        connection.close()
        raise
    return connection


def host(address: EngineAddress) -> str:
    """Return the engine's host name."""
    return urlsplit(address.url).hostname or "127.0.0.1"


def tls(address: EngineAddress) -> ssl.SSLContext | None:
    """Return the TLS context for connections to the engine; None for plain connections."""
    folder = address.certificates
    if folder is None or urlsplit(address.url).scheme == "unix":
        return None
    context = ssl.create_default_context()
    if not address.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if os.path.exists(ca := os.path.join(folder, "ca.pem")):
        context.load_verify_locations(ca)
    if os.path.exists(certificate := os.path.join(folder, "cert.pem")):
        context.load_cert_chain(certificate, os.path.join(folder, "key.pem"))
    return context


def call(
    address: EngineAddress,
    method: str,
    path: str,
    *,
    query: dict[str, Any] | None = None,
    body: Any = None,
    timeout_s: float = 60.0,
) -> EngineResponse:
    """Send one request on a new connection. A body of bytes is a tar archive; any other is sent as JSON.

    Raises:
        OSError: The engine cannot be reached, or the request timed out.
        http.client.HTTPException: The response is not HTTP, or ends too early.
    """
    connection = _Connection(address, timeout_s)
    try:
        is_archive = isinstance(body, bytes)
        sent = body if body is None or is_archive else json.dumps(body).encode()
        kind = "application/x-tar" if is_archive else "application/json"
        headers = {} if sent is None else {"Content-Type": kind}
        connection.request(method, target(path, query), sent, headers)
        answer = connection.getresponse()
        data = answer.read(ANSWER_BYTES)
        if answer.length and len(data) < ANSWER_BYTES:  # `read` of a size takes an early end for the end
            raise http.client.IncompleteRead(data, answer.length)
        return EngineResponse(answer.status, data)
    finally:
        connection.close()


def attach_request(execution: str) -> bytes:
    """Return the request that starts an exec and upgrades its connection to the exec's standard streams."""
    start = b'{"Detach": false, "Tty": false}'
    return (
        b"POST /exec/%s/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: %d\r\n\r\n%s"
        % (execution.encode(), len(start), start)
    )


class StreamSplitter:
    """Splits a container's multiplexed output, in which a header (stream, three zeros, length) precedes each piece."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._stream, self._left = 0, 0

    def feed(self, data: bytes) -> "list[tuple[int, bytes]]":
        """Return the received pieces, possibly partial, with their stream: 1 is stdout, 2 is stderr."""
        self._held += data
        frames = list[tuple[int, bytes]]()
        while self._held:
            if not self._left:
                if len(self._held) < 8:
                    break
                self._stream, self._left = self._held[0], int.from_bytes(self._held[4:8], "big")
                del self._held[:8]
                continue
            piece = bytes(self._held[: self._left])
            del self._held[: len(piece)]
            self._left -= len(piece)
            frames.append((self._stream, piece))
        return frames


def stream(
    address: EngineAddress, path: str, body: Any, *, timeout_s: float, most: int
) -> "tuple[EngineResponse, bool]":
    """POST a request and read the streamed response until its end, the timeout or `most` bytes.

    Returns:
        The response, and whether it ended before the timeout and the limit.

    Raises:
        OSError: The engine cannot be reached, or did not respond in time.
        http.client.HTTPException: The response is not HTTP.
    """
    deadline = time.monotonic() + timeout_s
    connection = _Connection(address, timeout_s)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        sock = connection.sock  # the response takes it over
        with connection.getresponse() as answer:
            size, pieces = 0, list[bytes]()
            while size < most and (left_s := deadline - time.monotonic()) > 0:
                sock.settimeout(left_s)
                try:
                    piece = answer.read1(1 << 16)
                except TimeoutError:
                    break
                if not piece:
                    return EngineResponse(answer.status, b"".join(pieces)), True
                pieces.append(piece)
                size += len(piece)
            return EngineResponse(answer.status, b"".join(pieces)), False
    finally:
        connection.close()


def target(path: str, query: dict[str, Any] | None = None) -> str:
    """Return the request target; query values other than text are encoded as JSON, as the engine expects."""
    if not query:
        return quote(path)
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in query.items()}
    return f"{quote(path)}?{urlencode(plain)}"


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: EngineAddress, timeout_s: float) -> None:
        super().__init__("docker")
        self._address, self._timeout_s = address, timeout_s

    def connect(self) -> None:
        self.sock = connect(self._address, self._timeout_s)
        if (context := tls(self._address)) is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname=host(self._address))
