"""Measured processes: each in a session of its own, pinned, read through /proc, and killed at the end."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from benchmarks.harness import BenchmarkError

ROOT: Final = Path(__file__).resolve().parents[1]
RELEASED_PYTHON: Final = ROOT / ".venvs" / "released-0.10.0" / "bin" / "python"
"""Interpreter of an installation of the released package."""
NO_RELEASED: Final = (
    "the released package: expected an interpreter at {}, got none; make one with "
    "python scripts/bootstrap.py released-0.10.0, or name another with --released-python"
)
START_TIMEOUT_S: Final = 60.0
HEALTH_POLL_INTERVAL_S: Final = 0.005

_OURS: Final = {"PYTHONPATH": str(ROOT)}
_PORTS: Final = range(20_000, 32_000)


def serve_command(app: str) -> tuple[str, ...]:
    """Return the command that serves an app as `ropewalk serve` does, for `serving`."""
    serve = (sys.executable, "-m", "openenv_core.cli", "serve", app)
    return (*serve, "--port", "{port}", "--log-level", "warning")


def uvicorn_command(app: str, *options: str, python: str | Path = sys.executable) -> tuple[str, ...]:
    """Return the command that serves an app on uvicorn, for `serving`."""
    return (str(python), "-m", "uvicorn", app, "--port", "{port}", "--log-level", "warning", *options)


BARE_WEBSOCKET: Final = ("--ws", "websockets-sansio", "--ws-per-message-deflate", "false")
"""Options of uvicorn for the WebSocket protocol that our server uses."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process and its descendants.

    Attributes:
        port: Port on 127.0.0.1 that it listens on.
        pid: Its process id.
        started_s: Seconds from starting the process to a healthy answer.
    """

    port: int
    pid: int
    started_s: float

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_ns(self) -> int:
        """Return the CPU time that it and its descendants have used so far, all threads included."""
        return sum(_cpu_ns(pid) for pid in tree(self.pid))

    def memory_kb(self) -> float:
        """Return its memory and its descendants': proportional if readable, else resident."""
        return 1024 * memory_mb([self.pid])


@contextmanager
def serving(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    core: int | None = None,
    health: bool = True,
) -> Iterator[Server]:
    """Run a server, and kill it and its descendants at the end.

    Args:
        command: Command that starts it; "{port}" is replaced by a free port on 127.0.0.1.
        env: Environment variables in addition to this process's own.
        core: Core to pin it to; None for any.
        health: Whether it has a /health; if not, it is ready when it accepts connections.

    Raises:
        BenchmarkError: No port was free, or the server did not start.
    """
    port, began = _free_port(), time.perf_counter()
    words = [word.replace("{port}", str(port)) for word in command]
    with TemporaryFile() as log:  # not a pipe: a server that logs would block once it is full
        process = start(words, {**_OURS, **(env or {})}, core, stdout=subprocess.DEVNULL, stderr=log)
        try:
            while not _healthy(port, health):
                if process.poll() is not None or time.perf_counter() > began + START_TIMEOUT_S:
                    log.seek(0)
                    output = log.read().decode(errors="replace")[-2000:]
                    raise BenchmarkError(f"expected a healthy server on port {port}, got:\n{output}")
                time.sleep(HEALTH_POLL_INTERVAL_S)
            yield Server(port, process.pid, time.perf_counter() - began)
        finally:
            kill(process)
            process.wait()


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    core: int | None = None,
    timeout_s: float = 120.0,
) -> str:
    """Run a process to its end and return its output.

    Raises:
        BenchmarkError: The process failed, or took too long.
    """
    process = start(command, {**_OURS, **(env or {})}, core, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    name = " ".join(command[:4])
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        kill(process)
        _, err = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output = err.decode(errors="replace")[-2000:]
        raise BenchmarkError(f"expected `{name}` to end within {timeout_s:g} s, got:\n{output}") from None
    if process.returncode:
        raise BenchmarkError(f"expected `{name}` to succeed, got:\n{err.decode(errors='replace')[-2000:]}")
    return str(out.decode())


def start(
    command: Sequence[str], env: Mapping[str, str], core: int | None = None, **streams: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, so that `kill` reaches its descendants; `run` and `serving` do so."""
    return subprocess.Popen(
        command if core is None else ["taskset", "-c", str(core), *command],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **streams,
    )


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    """Return a port that nothing listens on, below those that the system assigns to outgoing connections."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise BenchmarkError(f"expected a free port between {_PORTS[0]} and {_PORTS[-1]}, got none")


def _healthy(port: int, health: bool) -> bool:
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as sock:
            if not health:
                return True
            sock.sendall(request.encode())
            answer = b""
            while piece := sock.recv(4096):
                answer += piece
    except OSError:
        return False
    return b" 200 " in answer[:16] and b"healthy" in answer


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def memory_mb(roots: Sequence[int]) -> float:
    """Return the memory of processes and their descendants: proportional if readable, else resident."""
    return sum(_memory_kb(pid) for root in roots for pid in tree(root)) / 1024


def own_memory(kind: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, VmHWM (the peak), RssShmem."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {kind} in /proc/self/status")


def reset_own_peak() -> None:
    """Reset the peak of this process's memory to what it has now."""
    Path("/proc/self/clear_refs").write_text("5")


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process; Linux derives the number of its clock from its id."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0  # it has ended


def _memory_kb(pid: int) -> float:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return float(line.split()[1])
    return 0.0
