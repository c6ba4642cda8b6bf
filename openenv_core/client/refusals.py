"""What an HTTP status means to a caller: one place for handshakes of WebSockets and for plain HTTP."""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time

from openenv_core.errors import (
    AccessRefused,
    AuthenticationFailed,
    CapacityReached,
    ClientError,
    ConnectionFailed,
)
from openenv_core.protocol.codes import CAPACITY_REACHED
from openenv_core.protocol.urls import shown

_NO_SOCKET = (403, 404, 405, 426)
"""What servers answer that have no WebSocket at that path: 403 is uvicorn's way to say 404 to a WebSocket."""


def refusal(url: str, status: int, headers: Mapping[str, str], detail: str, *, socket: bool) -> ClientError:
    """Return the error for a server that answered but let nobody in.

    Args:
        url: What was asked for.
        status: The HTTP status.
        headers: Of the answer; names in lower case, or a mapping that does not mind.
        detail: The server's own words, if any.
        socket: Whether a WebSocket was asked for, and plain HTTP is something to try.
    """
    words = f": {detail[:300]}" if detail else ""
    got = f"expected {shown(url)} to let this client in, got HTTP {status}{words}"
    other_way = ', or pass transport="http" where the server speaks HTTP only' if socket else ""
    match status:
        case 401:
            return AuthenticationFailed(f"{got}; pass token= with a token that the server knows")
        case 403 | 421:
            cause = "the path" if status == 403 else "the port"
            return AccessRefused(
                f"{got}; use a host name and an origin that the server allows, check {cause} of the "
                f"URL{other_way if status == 403 else ''}"
            )
        case 429 | 503:
            wait = retry_after(headers.get("retry-after"))
            data = {} if wait is None else {"retry_after_s": wait}
            return CapacityReached(
                detail or f"the server takes no more sessions (HTTP {status})", CAPACITY_REACHED, data
            )
    hint = other_way if status in _NO_SOCKET else ""
    return ConnectionFailed(f"{got}; check that the URL is an OpenEnv server's{hint}")


def retry_after(value: str | None) -> float | None:
    """Read a Retry-After header, seconds or a date, as seconds from now; None where it says nothing."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
