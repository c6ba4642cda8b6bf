"""Network namespaces as hosts: one for a controller, and a link from it to each further host."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from missing import missing

CONTROLLER_ADDRESS = "10.77.0.1"


@dataclass(frozen=True)
class NamespaceHost:
    """A host: its namespace, its address, and the controller's end of its link."""

    namespace: str
    address: str
    link: str

    def pids(self) -> list[int]:
        """Return the processes that run there."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]


def inside(namespace: str) -> list[str]:
    """Return the words before a command that is to run in a namespace."""
    return ["ip", "netns", "exec", namespace]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[tuple[str, list[NamespaceHost]]]:
    """The controller's namespace, and hosts that reach it and, through it, each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing("network namespaces need root and the ip command")
    mark = f"{os.getpid() % 100000:x}"
    controller = f"rwc{mark}"
    hosts = [
        NamespaceHost(f"rwh{number}{mark}", f"10.77.{number}.2", f"rwl{number}{mark}")
        for number in range(1, count + 1)
    ]
    names = [controller, *(host.namespace for host in hosts)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        forward = [*inside(controller), "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]
        subprocess.run(forward, check=True, capture_output=True)
        _ip("-n", controller, "addr", "add", f"{CONTROLLER_ADDRESS}/32", "dev", "lo")
        for number, host in enumerate(hosts, 1):
            peer = ["peer", "name", "uplink", "netns", host.namespace]
            _ip("-n", controller, "link", "add", host.link, "type", "veth", *peer)
            _ip("-n", controller, "addr", "add", f"10.77.{number}.1/24", "dev", host.link)
            _ip("-n", controller, "link", "set", host.link, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "uplink")
            _ip("-n", host.namespace, "link", "set", "uplink", "up")
            _ip("-n", host.namespace, "route", "add", "default", "via", f"10.77.{number}.1")
        yield controller, hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
