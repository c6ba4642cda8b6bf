"""The network interface by which this host reaches another one, and whether an address is local. Linux only."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR; see netdevice(7)."""
_ANY_PORT = 9
_NAME_BYTES, _REQUEST_BYTES, _ADDRESS_OFFSET = 15, 256, 20
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""One address per line: in hexadecimal first, the interface's name last."""


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables by which torch.distributed is told the interface."""


def name_interface(environment: MutableMapping[str, str], host: str) -> None:
    """Set the interface of torch.distributed in `environment` to the one that reaches `host`, unless it is set.

    By default ranks resolve their own host name, which often gives loopback, unreachable for the others.

    Args:
        environment: The ranks' environment variables; changed in place.
        host: Name or address of another host, or the address by which others reach this one.
    """
    if (name := find_interface(host)) is not None:
        for variable in INTERFACE_VARIABLES:
            environment.setdefault(variable, name)


def find_interface(host: str) -> str | None:
    """Return the name of the interface that packets to `host` leave by, or None if unknown. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, remote = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(remote)
            own_address = probe.getsockname()[0]
        return (
            _find_ipv6_interface(own_address)
            if family == socket.AF_INET6
            else _find_ipv4_interface(own_address)
        )
    return None


def is_own_address(host: str) -> bool:
    """Whether an address, or the first address of a name, belongs to this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _find_ipv4_interface(own_address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return next(
            (name for _, name in socket.if_nameindex() if _get_address(probe, name) == own_address), None
        )


def _find_ipv6_interface(own_address: str) -> str | None:
    address = ipaddress.IPv6Address(own_address.partition("%")[0]).packed.hex()
    lines = (line.split() for line in _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines())
    return next((columns[-1] for columns in lines if columns and columns[0] == address), None)


def _get_address(probe: socket.socket, name: str) -> str | None:
    request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
    try:
        reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(reply[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4])
