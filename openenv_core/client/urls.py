"""Addresses: one URL of a server, for each way to reach it."""

from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import SESSION_ID
from openenv_core.protocol.urls import shown

_HTTP: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SOCKET: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(base_url: str, session_id: str | None = None) -> str:
    """Return the address of the session socket for a server's URL.

    Args:
        base_url: With or without the `/ws` at its end.
        session_id: The standing session to attach to.

    Raises:
        ConfigurationError: The URL is of another scheme, or names no host.
    """
    scheme, netloc, path, query = _parts(base_url, _SOCKET)
    if session_id is not None:
        query = f"{query}&session_id={quote(session_id)}".lstrip("&")
    return urlunsplit((scheme, netloc, f"{path}/ws", query, ""))


def http_url(base_url: str) -> str:
    """Return the address that the paths of plain HTTP are appended to.

    Raises:
        ConfigurationError: The URL is of another scheme, or names no host.
    """
    scheme, netloc, path, _ = _parts(base_url, _HTTP)
    return urlunsplit((scheme, netloc, path, "", ""))


def checked_session_id(session_id: str) -> str:
    """Return the id.

    Raises:
        ConfigurationError: No server would take it.
    """
    if not SESSION_ID.fullmatch(session_id):
        raise ConfigurationError(
            f"expected a session_id of 1 to 128 letters, digits, dots, dashes or underscores, got {session_id!r}"
        )
    return session_id


def _parts(base_url: str, schemes: dict[str, str]) -> tuple[str, str, str, str]:
    try:
        parts = urlsplit(base_url)
        scheme = schemes.get(parts.scheme) if parts.hostname else None
    except ValueError:  # brackets without an end
        scheme = None
    if scheme is None:
        raise ConfigurationError(
            f"expected a URL that starts with http://, https://, ws:// or wss://, got {shown(base_url)!r}"
        )
    return scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws").rstrip("/"), parts.query
