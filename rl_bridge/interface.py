"""The network interface by which this host reaches another one, whether an address is local, and free ports."""

import contextlib
import os
import random
import socket
from collections.abc import MutableMapping

import psutil

_ANY_PORT = 9
_PORT_RANGE = (20_000, 32_768)

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
        for name, addresses in psutil.net_if_addrs().items():
            if any(
                address.address.partition("%")[0] == own_address.partition("%")[0] for address in addresses
            ):
                return name
    return None


def own_address() -> str:
    """Return the address by which other ranks reach this one: that of gloo's interface, or else the host's name."""
    addresses = psutil.net_if_addrs().get(os.environ.get(INTERFACE_VARIABLES[0], ""), [])
    usable = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
    return usable[0] if usable else socket.gethostname()


def is_own_address(host: str) -> bool:
    """Whether an address, or the first address of a name, belongs to this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def find_free_port(host: str) -> int:
    """Return a free port of this host's address, below the kernel's ephemeral range, as it is bound only later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randrange(*_PORT_RANGE)
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
            return port
