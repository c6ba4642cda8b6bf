"""Free ports for servers that need a given one, outside the range that outgoing connections get."""

import random
import socket
from pathlib import Path

LOWEST = 10_000


def free_ports(count: int) -> range:
    """Return consecutive free ports."""
    # From this port on, the kernel assigns ports to outgoing connections.
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(LOWEST, lowest_ephemeral - count)
        ports = range(first, first + count)
        if all(map(_is_free, ports)):
            return ports


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
