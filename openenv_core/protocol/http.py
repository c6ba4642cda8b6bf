"""What HTTP carries beside frames: the names of headers and sessions, and URLs of servers."""

import re
from contextlib import suppress
from time import time
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from openenv_core.errors import ConfigurationError

SESSION_HEADER: Final = "X-OpenEnv-Session"
"""Header with the session of a request; in a response, the session that the server keeps."""

SESSION_COOKIE: Final = "openenv_session"
"""Cookie with the session, for callers that keep cookies; the header takes precedence."""

DETERMINISTIC_HEADER: Final = "X-OpenEnv-Deterministic"
"""Header of the WebSocket handshake's response and of /health: the environment declares itself `DETERMINISTIC`."""

DETERMINISTIC: Final = "true"
"""The header's only value. Released servers do not send the header, and released clients ignore it."""

SESSION_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Valid session ids, whether chosen by client or server."""


def is_bearer_token(text: str) -> bool:
    """Whether a text is a valid bearer token: printable ASCII without spaces."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def redact_url(url: str) -> str:
    """Return a URL for messages: without user, password and query, which may be secrets."""
    with suppress(ValueError):  # an unclosed bracket, or a port that is not a number
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # The password may contain an unquoted special character: hide everything before the last @.
    _, separator, address = url.rpartition("@")
    return ("...@" if separator else "") + address.partition("?")[0]


_HTTP: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SOCKET: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(base_url: str, session_id: str | None = None) -> str:
    """Return the WebSocket URL for a server's URL.

    Args:
        base_url: The server's URL, with or without `/ws` at its end.
        session_id: An existing session to attach to.

    Raises:
        ConfigurationError: The URL has another scheme or no host.
    """
    scheme, netloc, path, query = _parts(base_url, _SOCKET)
    if session_id is not None:
        query = f"{query}&session_id={quote(session_id)}".lstrip("&")
    return urlunsplit((scheme, netloc, f"{path}/ws", query, ""))


def http_url(base_url: str) -> str:
    """Return the base URL of a server's HTTP routes.

    Raises:
        ConfigurationError: The URL has another scheme or no host.
    """
    scheme, netloc, path, _ = _parts(base_url, _HTTP)
    return urlunsplit((scheme, netloc, path, "", ""))


def _parts(base_url: str, schemes: dict[str, str]) -> tuple[str, str, str, str]:
    try:
        parts = urlsplit(base_url)
        scheme = schemes.get(parts.scheme) if parts.hostname else None
    except ValueError:  # an unclosed bracket
        scheme = None
    if scheme is None:
        raise ConfigurationError(
            f"expected a URL that starts with http://, https://, ws:// or wss://, got {redact_url(base_url)!r}"
        )
    return scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws").rstrip("/"), parts.query


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header, seconds or a date, to seconds from now; None if it is missing or invalid."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        from email.utils import parsedate_to_datetime  # rarely needed, and slow to import
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
