"""Ports that nobody listens on, wherever one would."""

import socket


def free_ports(count: int) -> list[int]:
    """So many, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """One."""
    return free_ports(1)[0]
