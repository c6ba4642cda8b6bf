"""The socket that a server listens on, and whether strangers can reach it."""

import socket
from typing import Final

from openenv_core.errors import ConfigurationError
from servers.addresses import is_loopback
from servers.settings import MAKE_TOKEN, ServerSettings

BACKLOG: Final = 2048
"""Connections that may wait to be accepted: those of a trainer come all at once."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. `::` takes IPv4 as well.

    Raises:
        ConfigurationError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"expected to listen on {host}:{port}, got: {error}; choose another --port"
        ) from error


def inherited(fd: int) -> socket.socket:
    """Return the socket behind an inherited descriptor.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigurationError(f"expected --fd to be an open socket, got {fd}: {error}") from error
    listener.listen(BACKLOG)
    return listener


def refuse_strangers_without_token(
    listener: socket.socket, settings: ServerSettings, *, insecure: bool
) -> None:
    """Let a server without tokens be reached from this machine only, unless it was said otherwise.

    Raises:
        ConfigurationError: It can be reached from elsewhere.
    """
    if settings.tokens or insecure or listener.family == socket.AF_UNIX:
        return
    host, port = listener.getsockname()[:2]
    if not is_loopback(host):
        raise ConfigurationError(
            f"expected a token to listen beyond loopback, got none for {url_host(host)}:{port}; give "
            f"--token-file or ROPEWALK_TOKENS (make one with: {MAKE_TOKEN}), or --host 127.0.0.1, or, where "
            "the network keeps strangers out, --insecure"
        )


def url_host(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
