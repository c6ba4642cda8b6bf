"""Whether an environment talks to nobody but those whom its manifest names."""

import ipaddress
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.needs import needs
from openenv_core.checker.playing.compared import play_there, some_actions
from openenv_core.checker.subject import RunningServer, Subject
from openenv_core.checker.watching import hook
from openenv_core.checker.watching.hooking import hooked
from openenv_core.targets import TargetKind

EPISODES: Final = 3
LOOK_S: Final = 0.02
"""Pause between two looks at the connections of the server's processes."""


@check(Level.SEMANTIC)
def check_network_policy_holds(subject: Subject) -> None:
    """The environment talks to nobody but those whom its manifest allows.

    Python code is watched from within; compiled code and other programs by the connections that they hold. A
    container is played without any network.
    """
    if subject.kind is TargetKind.URL:
        raise NotApplicable("whom a server at a URL talks to cannot be seen from here")
    network = subject.promises.validation.network
    if network.mode == "public":
        raise NotApplicable("the manifest lets it talk to anybody (validation.network.mode)")
    if subject.kind is TargetKind.IMAGE:
        if network.mode != "no-network":
            raise NotApplicable("whom a container talks to is not looked at where it may talk to somebody")
        with subject.server(docker_options={"network": "none"}) as server:
            _play(subject, server)
        return
    with hooked() as (folder, env_vars):
        notes = folder / "hosts"
        env_vars |= {hook.OUT: str(notes), hook.HOSTS: json.dumps(network.allowed_hosts)}
        with subject.server(env_vars=env_vars) as server, _looking(server) as seen:
            _play(subject, server)
        if not notes.exists():
            raise NotApplicable("the server's interpreter cannot be watched: it was started without its site")
        asked = notes.read_text(encoding="utf-8").split()
    hosts = sorted({*asked, *(seen if not network.allowed_hosts else ())})
    if hosts:
        raise CheckFailed(
            f"expected the policy {network.mode} to hold, got attempts to reach {', '.join(hosts[:5])}",
            change="take the request out, or declare it: validation.network in openenv.yaml, mode allowlist "
            "with allowed_hosts, or public",
        )


def _play(subject: Subject, server: RunningServer) -> None:
    for number in range(EPISODES):
        with subject.client(server.url) as client:
            play_there(subject, client, subject.limits.seed + number, some_actions(subject, number))


@contextmanager
def _looking(server: RunningServer) -> Iterator[set[str]]:
    """Note the remote ends of the server's connections; for programs that are no Python."""
    try:
        import psutil
    except ImportError as error:
        raise needs("psutil", error) from error
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            for pid in server.pids():
                with suppress(psutil.Error):
                    connections: list[Any] = psutil.Process(pid).net_connections("inet")
                    seen.update(one.raddr.ip for one in connections if one.raddr and _is_far(one.raddr.ip))

    thread = threading.Thread(target=look, name="openenv-check-network", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _is_far(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return not (mapped or found).is_loopback
