"""Which proxy the environment names for a URL: one answer for every way to reach a server; a client that takes it."""

import ipaddress
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl

    import httpx


def proxy_for(url: str) -> str | None:
    """Return the proxy to take to a URL; never one to this machine itself.

    The variables are those that everybody reads: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, in either case.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_this_machine(host):
        return None
    from urllib.request import getproxies, proxy_bypass  # not needed by those who stay on this machine

    if proxy_bypass(host):
        return None
    proxies = getproxies()
    secure = parts.scheme in ("wss", "https")
    for scheme in ("wss", "socks", "https", "all") if secure else ("ws", "socks", "http", "all"):
        if proxy := proxies.get(scheme):
            return proxy if "://" in proxy else f"http://{proxy}"
    return None


def _is_this_machine(host: str) -> bool:
    """Whether it names this machine: by loopback, or by the address of all interfaces, as servers print it."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    return False


def client_for(url: str, token: str | None = None) -> "httpx.Client":
    """Return a client for one server. It follows no redirects: one may lead to somebody who must not get the token.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """
    import httpx

    proxy = proxy_for(url)
    plain = url.startswith("http://") and proxy is None
    try:
        # Reading the system's certificates takes longer than a request to a server nearby.
        transport = httpx.HTTPTransport(verify=False if plain else _make_tls_context(), proxy=proxy)
    except ImportError as error:
        raise ConfigurationError(f"expected to use the proxy of the environment, got: {error}") from error
    # Bounds on answers hold for what comes over the wire, so nothing is compressed.
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(transport=transport, headers=headers, follow_redirects=False, trust_env=False)


@cache
def _make_tls_context() -> "ssl.SSLContext":
    import httpx

    return httpx.create_ssl_context()
