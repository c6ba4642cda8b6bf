"""IP addresses as sockets and headers write them."""

import ipaddress
from typing import TypeAlias

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
