"""What a sandbox's agent does when two events come at once, or in the other order."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from living import DEADLINE_S

from openenv_core.sandbox.inside.interpreter import FILE_PIECE, pack, receive

_INSIDE = Path(__file__).parents[2] / "openenv_core/sandbox/inside"
_PROGRAM = """
import errno, os, socket, sys
sys.path[0] = sys.argv[4]
import boot
boot.prepare()  # the other imports of the packages take a second
from openenv_core.sandbox.inside import agent
fork, full = os.fork, os.path.join(sys.argv[3], "full")
def fork_unless_full():
    if os.path.exists(full):
        raise BlockingIOError(errno.EAGAIN, "no process is left")
    return fork()
os.fork, agent.FORK_TIMEOUT_S = fork_unless_full, 0.2
channel, host = map(int, sys.argv[1:3])
agent.Agent(channel, channel, sys.argv[3], sessions=True, host=socket.socket(fileno=host)).serve()
"""


class _Host:
    """The other end of an agent's channel."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.channel, channel = socket.socketpair()
        self.control, control = socket.socketpair()
        self.channel.settimeout(DEADLINE_S)
        with channel, control:
            descriptors = channel.fileno(), control.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, descriptors), home, _INSIDE],
                pass_fds=descriptors,
                env={**os.environ, "TMPDIR": str(home / ".tmp")},
            )
        self._numbers = iter(range(1, 1000))
        self._frames: list[tuple[dict[str, Any], bytes]] = []
        assert self._next()[0]["hello"]

    def send(self, op: str, **fields: Any) -> int:
        number = next(self._numbers)
        self.channel.sendall(pack({"id": number, "op": op, **fields}))
        return number

    def reply(self, number: int) -> dict[str, Any]:
        return self._find(lambda header: header.get("id") == number)[0]

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.reply(self.send(op, **fields))

    def run(self, code: str) -> list[dict[str, Any]]:
        reply = self.ask("run", name="c", code=code, envs={})
        assert "error" not in reply, reply
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """What the running cell tells until its end."""
        lines: list[dict[str, Any]] = []
        while True:
            header, blob = self._find(lambda header: header.get("stream") == "c")
            if "end" in header:
                return lines
            if "line" in header:
                lines.append(json.loads(blob))

    def _find(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], bytes]:
        while True:
            for number, frame in enumerate(self._frames):
                if wanted(frame[0]):
                    return self._frames.pop(number)
            self._frames.append(self._next())

    def _next(self) -> tuple[dict[str, Any], bytes]:
        return receive(self.channel.recv)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[_Host]:
    host = _Host(tmp_path)
    try:
        yield host
    finally:
        host.process.kill()
        host.process.wait()
        host.channel.close()
        host.control.close()


@pytest.fixture
def interpreter(host: _Host) -> int:
    """The process id of the interpreter of the context `c`, where x is 1."""
    assert "error" not in host.ask("context", name="c", cwd="")
    return int(host.run("import os\nx = 1\nos.getpid()")[0]["text"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def pending(pid: int, number: signal.Signals) -> bool:
    return bool(int(status(pid, "ShdPnd"), 16) >> (number - 1) & 1)


def names(lines: list[dict[str, Any]]) -> list[str]:
    return [line["name"] for line in lines if line["type"] == "error"]


def test_ends_that_come_at_once_do_not_stop_the_agent(host: _Host, interpreter: int) -> None:
    (host.home / "big").write_bytes(bytes(FILE_PIECE))
    command = host.ask("start", stream="p", cmd="/bin/sleep", args=["600"], envs={}, cwd="", stdin=False)[
        "pid"
    ]
    reading = host.send("read", path="big", offset=0)
    host.channel.recv(1, socket.MSG_PEEK)  # it answers, and has to wait until more of that is read
    for pid in (command, interpreter):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: status(pid, "State").startswith("Z"))  # type: ignore[misc]
        until(lambda: not pending(host.process.pid, signal.SIGCHLD))
    host.reply(reading)
    # The new interpreter's connection has the old one's number, and nothing to read.
    assert "error" not in host.ask("stat", path=".")
    assert names(host.run("x")) == ["NameError"]


def test_an_interrupt_that_comes_before_its_cell_interrupts_it(host: _Host, interpreter: int) -> None:
    os.kill(interpreter, signal.SIGSTOP)
    until(lambda: status(interpreter, "State").startswith("T"))
    assert "error" not in host.ask("run", name="c", code="while True: pass", envs={})
    assert "error" not in host.ask("interrupt", name="c")
    assert pending(interpreter, signal.SIGINT)
    os.kill(interpreter, signal.SIGCONT)
    assert names(host.lines()) == ["KeyboardInterrupt"]
    assert host.run("x")[0]["text"] == "1"


def test_a_cell_ends_with_its_context(host: _Host, interpreter: int) -> None:
    assert "error" not in host.ask("run", name="c", code="import time; time.sleep(600)", envs={})
    assert "error" not in host.ask("drop", name="c")
    assert names(host.lines()) == ["InterpreterLost"]


def test_an_interpreter_that_cannot_be_replaced_is_replaced_later(host: _Host, interpreter: int) -> None:
    full = host.home / "full"
    full.touch()
    assert names(host.run("os._exit(3)")) == ["InterpreterLost"]
    assert host.ask("run", name="c", code="1", envs={})["error"] == "resource_exhausted"
    full.unlink()
    assert names(host.run("x")) == ["NameError"]


def test_an_interpreter_that_does_not_fork_in_time_is_replaced(host: _Host, interpreter: int) -> None:
    os.kill(interpreter, signal.SIGSTOP)
    folder = host.home / ".tmp" / "copy"
    folder.mkdir(parents=True)
    refused = host.ask("fork", folder=str(folder), contexts=["c"])
    assert refused["error"] == "internal"
    assert "variables are gone" in refused["message"]
    assert names(host.run("x")) == ["NameError"]  # else it would still wait for the descriptors of that fork
