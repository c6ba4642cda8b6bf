"""Bodies of HTTP requests, read whole before anything works on them: bounded in size and in time."""

import asyncio
from collections.abc import Mapping, Sequence

from starlette.types import Message, Receive

from servers.security.refusal import TurnedAwayError
from servers.settings import ServerSettings

REFUSAL_READ_TIMEOUT_S = 2.0
"""Seconds that a caller gets to read its refusal while the rest of its body is thrown away. A connection that is
closed while data is on its way is reset, and the refusal is lost with it."""


class ClientLeftError(Exception):
    """The caller left before its body had come."""


class Bodies:
    """Reads bodies within the limits of a server.

    Args:
        settings: The server's settings.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max = settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s

    def announced(self, headers: Mapping[bytes, Sequence[bytes]]) -> bool:
        """Return whether a body comes.

        Raises:
            TurnedAwayError: 413, 415 or 400: the headers say already that it cannot be taken.
        """
        encodings = [value.strip().lower() for value in headers.get(b"content-encoding", ())]
        if any(value not in (b"", b"identity") for value in encodings):
            raise TurnedAwayError(
                415, "expected a body without Content-Encoding, got one; send it uncompressed"
            )
        if b"transfer-encoding" in headers:
            if b"content-length" in headers:
                raise TurnedAwayError(400, "expected Transfer-Encoding or Content-Length, got both")
            return True
        lengths = {value.strip() for value in headers.get(b"content-length", ())}
        if not lengths:
            return False
        length = lengths.pop()
        if lengths or not length.isdigit():
            raise TurnedAwayError(400, "expected one whole number in Content-Length")
        # int() of a long run of digits is slow, and past twenty the length is too great in any case.
        if len(length) > 20 or int(length) > self._max:
            raise self._too_large()
        return int(length) > 0

    async def read(self, receive: Receive) -> bytes:
        """Read the whole body.

        Raises:
            TurnedAwayError: 413 or 408.
            ClientLeftError: The connection is gone.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientLeftError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise TurnedAwayError(
                408, f"expected the whole body within {self._timeout_s:g} s, got {size} bytes of it"
            ) from None

    def _too_large(self) -> TurnedAwayError:
        return TurnedAwayError(
            413,
            f"expected a body of at most {self._max} bytes, got a larger one; the limit is --max-body "
            "(ROPEWALK_MAX_BODY_BYTES)",
        )


async def discard(receive: Receive) -> None:
    """Throw away what still comes, until it ends, the caller leaves, or LINGER_S is over."""
    try:
        async with asyncio.timeout(REFUSAL_READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def replay(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that gives a message once more, then what the connection gives."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return first

    return again
