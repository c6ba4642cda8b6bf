"""The proxy for a URL, from environment variables, and an HTTP client that uses it."""

import ipaddress
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl

    import httpx


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def proxy_for(url: str) -> str | None:
    """Return the proxy for a URL; None for this machine itself.

    Reads the usual variables, in either case: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, with networks too.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_this_machine(host):
        return None
    from urllib.request import getproxies, proxy_bypass  # not needed for this machine itself

    proxies = getproxies()
    if proxy_bypass(host) or _is_in_network(host, proxies.get("no", "")):
        return None
    secure = parts.scheme in ("wss", "https")
    for scheme in ("wss", "socks", "https", "all") if secure else ("ws", "socks", "http", "all"):
        if proxy := proxies.get(scheme):
            return proxy if "://" in proxy else f"http://{proxy}"
    return None


def ip_address(host: str) -> Address | None:
    """Return the IP address in a host string, or None if it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    # A dual-stack socket sees 127.0.0.1 as ::ffff:127.0.0.1.
    return getattr(address, "ipv4_mapped", None) or address


def _is_this_machine(host: str) -> bool:
    """Whether a host is this machine: loopback, or the wildcard address, which servers print."""
    if (address := ip_address(host)) is not None:
        return address.is_loopback or address.is_unspecified
    return f".{host.rstrip('.')}".endswith(".localhost")  # RFC 6761


def _is_in_network(host: str, no_proxy: str) -> bool:
    """Whether NO_PROXY names a network with this address, such as 10.0.0.0/8, which urllib does not read."""
    address = ip_address(host)
    for entry in no_proxy.split(",") if address is not None else ():
        with suppress(ValueError):
            if "/" in entry and address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


def client_for(url: str, token: str | None = None) -> "httpx.Client":
    """Return an HTTP client for one server. It follows no redirects: the target must not receive the token.

    Raises:
        ConfigurationError: The proxy needs a package that is not installed.
    """
    import httpx

    proxy = proxy_for(url)
    plain = url.startswith("http://") and proxy is None
    try:
        # Loading the system's certificates takes longer than a request to a nearby server.
        transport = httpx.HTTPTransport(verify=False if plain else tls_context(), proxy=proxy)
    except ImportError as error:
        raise ConfigurationError(f"expected to use the proxy of the environment, got: {error}") from error
    # No compression: limits on response sizes count the bytes on the wire.
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(transport=transport, headers=headers, follow_redirects=False, trust_env=False)


@cache
def tls_context() -> "ssl.SSLContext":
    """Return the TLS context of all HTTP clients of this process."""
    import httpx

    return httpx.create_ssl_context()
