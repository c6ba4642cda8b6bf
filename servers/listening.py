"""The socket that a server listens on, and whether strangers can reach it."""

import errno
import ipaddress
import socket
from typing import Final, TypeAlias

from openenv_core.errors import ConfigurationError
from servers.settings import MAKE_TOKEN, ServerSettings

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def ip_address(host: str) -> Address | None:
    """Return the address that a host is, or None where it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    # ::ffff:127.0.0.1 is how a socket of both families sees 127.0.0.1.
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Say whether a host is an address that can only be reached from this machine."""
    address = ip_address(host)
    return address is not None and address.is_loopback


BACKLOG: Final = 2048
"""Connections that may wait to be accepted: those of a trainer come all at once."""

_NO_ADDRESS_OF_OURS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket. `::` takes IPv4 as well."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both, reuse_port=shared
        )
    except (OSError, OverflowError) as error:
        # What keeps a socket from an address of this machine is its port: taken, reserved, or no port at all.
        elsewhere = isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _NO_ADDRESS_OF_OURS
        raise ConfigurationError(
            f"expected to listen on {url_host(host)}:{port}, got: {error}; "
            + ("choose a --host that this machine has" if elsewhere else "choose another --port")
        ) from error


def listen_often(host: str, port: int, times: int) -> list[socket.socket]:
    """Return several sockets that listen on one address; the system deals connections out among them.

    Of 64 connections to two processes one got 27 to 37 in this way, in a burst or one after another. Where both
    accept from one socket, a burst of 64 goes to whichever wakes first (0 to 64), with small accept batches too.

    Raises:
        ConfigurationError: The address cannot be had.
    """
    # Without SO_REUSEPORT first: with it, a second server would take a part of the first one's connections.
    with listen(host, port) as probe:
        port = probe.getsockname()[1]
    return [listen(host, port, shared=True) for _ in range(times)]


def inherit_socket(fd: int) -> socket.socket:
    """Return the socket behind an inherited descriptor. ConfigurationError: there is none."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigurationError(f"expected --fd to be an open socket, got {fd}: {error}") from error
    listener.listen(BACKLOG)
    return listener


def is_exposed(listener: socket.socket) -> bool:
    """Say whether callers beyond this machine reach a listening socket, as far as its address tells."""
    return listener.family != socket.AF_UNIX and not is_loopback(listener.getsockname()[0])


def require_token_if_exposed(listener: socket.socket, settings: ServerSettings, *, insecure: bool) -> None:
    """Let a server without tokens be reached from this machine only, unless it was said otherwise.

    Raises:
        ConfigurationError: It can be reached from elsewhere.
    """
    if settings.tokens or insecure or not is_exposed(listener):
        return
    host, port = listener.getsockname()[:2]
    raise ConfigurationError(
        f"expected a token to listen beyond loopback, got none for {url_host(host)}:{port}; give "
        f"--token-file or ROPEWALK_TOKENS (make one with: {MAKE_TOKEN}), or --host 127.0.0.1, or, where "
        "the network keeps strangers out, --insecure"
    )


def url_host(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
