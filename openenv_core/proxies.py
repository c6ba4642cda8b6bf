"""Which proxy the environment names for a URL: one answer for every way to reach a server."""

import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit


def proxy_for(url: str) -> str | None:
    """Return the proxy to take to a URL; never one to this machine itself.

    The variables are those that everybody reads: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, in either case.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _is_here(host):
        return None
    from urllib.request import getproxies, proxy_bypass  # not needed by those who stay on this machine

    if proxy_bypass(host):
        return None
    proxies = getproxies()
    secure = parts.scheme in ("wss", "https")
    for scheme in ("wss", "socks", "https", "all") if secure else ("ws", "socks", "http", "all"):
        if found := proxies.get(scheme):
            return found if "://" in found else f"http://{found}"
    return None


def _is_here(host: str) -> bool:
    """Whether it names this machine: by loopback, or by the address of all interfaces, as servers print it."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    return False
