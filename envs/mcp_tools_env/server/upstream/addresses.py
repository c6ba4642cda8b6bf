"""Checks of tool servers' addresses, which must be public unless the operator allows others."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from .errors import AddressRefusedError

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host and port to all of the host's addresses."""

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

SPECIAL: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # the metadata service of a cloud
        "192.0.0.0/24",  # of another; Python versions differ on which of these addresses are public
        "192.88.99.0/24",
        "2001::/23",
    )
)
"""Networks that look public but are reserved for internal use."""

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


def check_address(address: str) -> None:
    """Check that an address is public: not of this machine, a private network, or a cloud's metadata service.

    Raises:
        AddressRefusedError: It is not public, or not an IP address.
    """
    try:
        # Drop a zone ("fe80::1%eth0"), which never makes an address public.
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise AddressRefusedError(f"expected an IP address, got {address[:80]!r}") from None
    if _is_private(_unwrap_ipv4(ip)):
        raise AddressRefusedError(f"expected a public address, got {address}")


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host. Any notation that the system accepts (127.1, 0x7f000001) works here too."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in infos))


async def resolve_checked(
    host: str, port: int, *, allow_private: bool, look_up: Resolve = resolve
) -> list[str]:
    """Resolve a host once and check its addresses. Connect only to these, not by resolving the host again.

    Raises:
        AddressRefusedError: The host has no address, or one that is not public.
    """
    try:
        addresses = await look_up(host, port)
    except OSError as error:
        raise AddressRefusedError(f"expected a host with an address, got {host!r}: {error}") from error
    if not addresses:
        raise AddressRefusedError(f"expected a host with an address, got {host!r}, which has none")
    if not allow_private:
        for address in addresses:
            try:
                check_address(address)
            except AddressRefusedError as error:
                raise AddressRefusedError(
                    f"{error} for {host!r}; set ropewalk.allow_private in its configuration where that is right"
                ) from None
    return addresses


def _is_private(address: _Address) -> bool:
    return (
        any(address in network for network in SPECIAL)
        or not address.is_global
        or address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or (isinstance(address, ipaddress.IPv6Address) and address.is_site_local)
    )


def _unwrap_ipv4(address: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address embeds, or else the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return inner
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
