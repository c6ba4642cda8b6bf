"""Which addresses a tool server may have: public ones, unless its operator says otherwise."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from .errors import AddressRefusedError

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Looks up the addresses of a host, all of them."""

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

SPECIAL: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # where a cloud tells its machines their secrets
        "192.0.0.0/24",  # and another; Pythons differ in what of this network they call public
        "192.88.99.0/24",
        "2001::/23",
    )
)
"""Networks that look public and are for the use of machines among themselves."""

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


def check_address(address: str) -> None:
    """Refuse an address that is not public: of this machine, of a private network, of a cloud's metadata.

    Raises:
        AddressRefusedError: It is one of those, or none at all.
    """
    try:
        # A zone ("fe80::1%eth0") makes no address public.
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise AddressRefusedError(f"expected an IP address, got {address[:80]!r}") from None
    if _is_private(_unwrap_ipv4(ip)):
        raise AddressRefusedError(f"expected a public address, got {address}")


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host. What the system reads as an address (127.1, 0x7f000001) is read so here."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in infos))


async def resolve_checked(
    host: str, port: int, *, allow_private: bool, look_up: Resolve = resolve
) -> list[str]:
    """Return the addresses of a host, looked up once; whoever connects has to use these.

    Raises:
        AddressRefusedError: One of them is not public, or there is none.
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
    """Return the IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return inner
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
