"""Listening sockets, whether other machines can reach them, and the signals that end a server."""

import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.proxies import ip_address
from servers.settings import MAKE_TOKEN, ServerSettings


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address."""
    address = ip_address(host)
    return address is not None and address.is_loopback


BACKLOG: Final = 2048
"""Connections that may wait to be accepted: a trainer opens all of its own at once."""

_NO_ADDRESS_OF_OURS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a listening socket; `::` accepts IPv4 as well. With `shared`, several can listen on one address.

    Raises:
        ConfigurationError: The address is invalid, not of this machine, or in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual_stack = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual_stack, reuse_port=shared
        )
    except (OSError, OverflowError) as error:
        # On an address of this machine, listening can fail only for its port: in use, reserved or out of range.
        is_foreign_address = (
            isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _NO_ADDRESS_OF_OURS
        )
        raise ConfigurationError(
            f"expected to listen on {url_host(host)}:{port}, got: {error}; "
            + ("choose a --host that this machine has" if is_foreign_address else "choose another --port")
        ) from error


def open_listeners(host: str, port: int, times: int) -> list[socket.socket]:
    """Return several sockets that listen on one address; the kernel distributes connections among them.

    Of 64 connections to two processes, one process got 27 to 37 in this way, in a burst or one after another. If both
    accept from one socket, a burst goes to the process that wakes first (0 to 64), even with small accept batches.

    Raises:
        ConfigurationError: As `listen`.
    """
    # First without SO_REUSEPORT, so that this fails on another server's port instead of sharing its connections.
    with listen(host, port) as probe:
        port = probe.getsockname()[1]
    return [listen(host, port, shared=True) for _ in range(times)]


def inherit_socket(fd: int) -> socket.socket:
    """Return the socket of an inherited descriptor. ConfigurationError: It is not an open socket."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigurationError(f"expected --fd to be an open socket, got {fd}: {error}") from error
    listener.listen(BACKLOG)
    return listener


def is_exposed(listener: socket.socket) -> bool:
    """Return whether other machines may reach a listening socket, by its address."""
    return listener.family != socket.AF_UNIX and not is_loopback(listener.getsockname()[0])


def require_token_if_exposed(listener: socket.socket, settings: ServerSettings, *, insecure: bool) -> None:
    """Refuse to listen beyond loopback without a token, unless `insecure`.

    Raises:
        ConfigurationError: Other machines may reach the socket, and there is no token.
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
    """Return a host as written in a URL, with brackets if it is an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a server: SIGHUP not under nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if ignores_hangup else (signal.SIGHUP,))]


@contextmanager
def handling_stop_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have a function called on these signals while the block runs."""
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
