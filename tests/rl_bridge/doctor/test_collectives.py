"""Processes that meet and compute together: on one host, on two by name, and with one missing."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from serve_process import eventually

from rl_bridge.doctor.collectives import Rendezvous, check_collectives
from rl_bridge.doctor.host import Severity

pytestmark = pytest.mark.slow


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def rendezvous(address: str, **settings: Any) -> Rendezvous:
    usual = {"num_nodes": 1, "node_rank": 0, "per_host": 1, "on_gpus": False, "megabytes": 4}
    return Rendezvous(address=address, **{**usual, **settings})


def ranks_alive(address: str) -> list[str]:
    """Command lines of ranks of a rendezvous that still run."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "rl_bridge.doctor.collectives" in line and address in line:
            lines.append(line)
    return lines


def test_two_processes_of_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rl_bridge").mkdir()
    (tmp_path / "rl_bridge" / "__init__.py").write_text("raise RuntimeError('this folder is not Ropewalk')")
    monkeypatch.chdir(tmp_path)
    (found,) = check_collectives(rendezvous(free_address(), per_host=2))
    assert found.level is Severity.GOOD
    assert "2 processes on 1 host (" in found.told
    assert found.metrics["small_us"] > 0
    assert found.metrics["reduce_gbps"] > 0


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, at 10.79.0.1 and 10.79.0.2."""
    names = [f"rwd{number}{os.getpid() % 100000:x}" for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.soak
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and the ip command"
)
def test_two_hosts_that_share_nothing_but_a_link() -> None:
    """The name of a host leads to its own loopback, as it often does; the command finds the way all the same."""
    source = "import sys; from openenv_core.cli.main import run; from rl_bridge.cli.doctor import COMMAND; "
    source += "sys.exit(run(COMMAND, sys.argv[1:]))"
    options = "--num_nodes 2 --addr 10.79.0.1:29500 --procs 1 --megabytes 4 --json --node_rank"
    with two_namespaces() as names:
        hosts = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", source, *options.split(), str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank, name in enumerate(names)
        ]
        outputs = [host.communicate(timeout=280)[0].splitlines() for host in hosts]
    found = [json.loads(line) for line in (*outputs[0][-3:-1], outputs[1][-2])]
    assert [one["level"] for one in found] == ["good"] * 3, found
    assert "2 processes on 2 hosts" in found[2]["told"]
    assert found[1]["metrics"]["pair_gbps"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("node_rank", [0, 1])
def test_host_that_does_not_come(node_rank: int) -> None:
    address = free_address()
    (found,) = check_collectives(rendezvous(address, num_nodes=2, node_rank=node_rank, timeout_s=2))
    assert found.level is Severity.BAD
    assert f"expected 2 processes to meet at {address} within 2 s" in found.told
    # The first host has the place where all meet: who else is missing can be said there alone.
    assert ("no host joined as --node_rank 1 within 2 s" if node_rank == 0 else "Error") in found.told
    assert "--node_rank N" in found.told
    assert ranks_alive(address) == []


@pytest.mark.soak
def test_processes_end_with_the_command() -> None:
    """Even where that is killed while they wait for another host."""
    address = free_address()
    settings = rendezvous(address, num_nodes=2, timeout_s=600).model_dump_json()
    source = "from rl_bridge.doctor.collectives import *; "
    source += f"check_collectives(Rendezvous.model_validate_json({settings!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = subprocess.Popen([sys.executable, "-c", source], env=environment)
    try:
        host, port = address.split(":")
        eventually(lambda: _listens(host, int(port)))
    finally:
        command.kill()
        command.wait()
    eventually(lambda: not ranks_alive(address))


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@pytest.mark.soak
def test_process_that_dies_under_way_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Doomed(subprocess.Popen[str]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)
            if len(started) == 2:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(subprocess, "Popen", Doomed)
    address, began = free_address(), time.monotonic()
    (found,) = check_collectives(rendezvous(address, per_host=2, timeout_s=4))
    assert found.level is Severity.BAD
    assert time.monotonic() - began < 60
    assert ranks_alive(address) == []
