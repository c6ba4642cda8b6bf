"""Ports for servers that have to be told theirs: free, and none that a connection going out gets by chance."""

import random
import socket
from pathlib import Path

LOWEST = 10_000


def free_ports(count: int) -> range:
    """So many, in a row."""
    # From here on the kernel gives them to whoever connects.
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(LOWEST, given - count)
        ports = range(first, first + count)
        if all(map(_is_free, ports)):
            return ports


def free_port() -> int:
    """One."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
