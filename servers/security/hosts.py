"""Host and Origin: what keeps a page in somebody's browser from driving a server that the browser can reach.

A page may send its visitor's browser to any address, this server's included. Where the page's own name has been
pointed at that address (DNS rebinding) the browser takes the server for the page's own, and only the name in
Host tells. Where it has not, Origin tells.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from openenv_core.errors import ConfigurationError
from servers.listening import ip_address, is_loopback
from servers.security.refusal import TurnedAwayError

ANY = "*"

_NETLOC = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_ORIGIN = re.compile(rf"(?P<scheme>https?)://{_NETLOC.pattern}", re.IGNORECASE)
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Netloc(NamedTuple):
    """A host in lower case, an IPv6 address without its brackets, and the port where one is named."""

    host: str
    port: int | None


class AllowedHosts:
    """Which hosts a server answers to.

    On a connection to a loopback address a name other than localhost is somebody's name for this machine, and
    most likely a trap. On other addresses a name without a dot passes as well (containers and neighbours are
    called so, and nobody can own one in the public DNS). IP addresses always pass: rebinding needs a name.

    Args:
        allowed: Further names; `*.example.org` for all names under one, `*` for any.

    Raises:
        ConfigurationError: One of them is no name.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        names = [name.lower().removesuffix(".") for name in allowed]
        for name in names:
            if not _PATTERN.fullmatch(name):
                raise ConfigurationError(
                    f"expected an allowed host to be a name without scheme and port, *.NAME or *, got {name!r}"
                )
        self._any = ANY in names
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def check(self, values: Sequence[bytes], local: object) -> Netloc:
        """Return what Host names.

        Args:
            values: The values of the header Host.
            local: The local address of the connection, or the path of a Unix socket.

        Raises:
            TurnedAwayError: 400 where there is not one well-formed Host, 421 where it is foreign.
        """
        if len(values) != 1:
            raise TurnedAwayError(400, f"expected one header Host, got {len(values)}")
        match = _NETLOC.fullmatch(values[0].decode("latin-1").strip())
        netloc = _netloc(match) if match else None
        if netloc is None:
            raise TurnedAwayError(
                400, "expected the header Host to be a name or an address, with or without a port"
            )
        if not self._serves(netloc.host, local):
            raise TurnedAwayError(
                421,
                f"expected a Host of this server, got {netloc.host!r}; to serve that name, start with "
                f"--allowed-host {netloc.host} (ROPEWALK_ALLOWED_HOSTS)",
            )
        return netloc

    def _serves(self, host: str, local: object) -> bool:
        if self._any or host in self._names or host == "localhost" or ip_address(host) is not None:
            return True
        if host.endswith(self._suffixes):
            return True
        return not _is_loopback(local) and "." not in host


class Origins:
    """Which pages may use a server: those that it serves itself, and those that are allowed.

    Args:
        allowed: Further origins, as in `https://example.org`; `null` is one too; `*` for any.

    Raises:
        ConfigurationError: One of them is no origin.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(_parsed(origin) or origin for origin in allowed)
        for origin in self._allowed - {ANY, "null"}:
            if isinstance(origin, str):
                raise ConfigurationError(
                    f"expected an allowed origin as in https://example.org, or null, or *, got {origin!r}"
                )

    def check(self, values: Sequence[bytes], host: Netloc) -> None:
        """Let pass a request without Origin, and those whose Origin is the host's own or allowed.

        Args:
            values: The values of the header Origin.
            host: What Host names.

        Raises:
            TurnedAwayError: 403.
        """
        if not values or self._any:
            return
        text = values[0].decode("latin-1").strip()
        origin = _parsed(text)
        if len(values) == 1 and origin is not None:
            scheme, name, port = origin
            # A proxy may have taken the TLS away, so a port that Host does not name is the Origin's default.
            if name == host.host and port == (host.port or _DEFAULT_PORTS[scheme]):
                return
        if len(values) == 1 and (origin or text) in self._allowed:
            return
        raise TurnedAwayError(
            403,
            "expected no Origin, this server's own, or an allowed one, got another; to let a page in, start with "
            "--allowed-origin SCHEME://HOST (ROPEWALK_ALLOWED_ORIGINS)",
        )


def _is_loopback(local: object) -> bool:
    return isinstance(local, str) and is_loopback(local)


def _netloc(match: re.Match[str]) -> Netloc | None:
    host, port = match["host"].lower(), match["port"]
    if host.startswith("["):
        host = host[1:-1]
        if ip_address(host) is None:
            return None
    else:
        host = host.removesuffix(".")
    if not host or (port is not None and int(port) > 65_535):
        return None
    return Netloc(host, int(port) if port is not None else None)


def _parsed(origin: str) -> tuple[str, str, int] | None:
    match = _ORIGIN.fullmatch(origin.removesuffix("/"))
    netloc = _netloc(match) if match else None
    if match is None or netloc is None:
        return None
    scheme = match["scheme"].lower()
    return scheme, netloc.host, netloc.port or _DEFAULT_PORTS[scheme]
