"""Measured processes: started in their own session, pinned, read through /proc, and always killed at the end."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

_PORTS: Final = range(20_000, 32_000)


class StartError(Exception):
    """A server did not start; the message ends with its output."""


class Server:
    """A server process and its descendants.

    Args:
        command: Command that starts it.
        port: Port on 127.0.0.1 that it will listen on.
        env: Environment variables in addition to this process's own.
        core: Core to pin it to; None for any.
        health: Whether it has a /health; if not, it is ready when it accepts connections.

    Attributes:
        port: Port on 127.0.0.1 that it listens on.
        pid: Its process id.
        started_s: Seconds from starting the process to a healthy answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        env: Mapping[str, str],
        core: int | None,
        *,
        health: bool = True,
    ) -> None:
        self.port = port
        self._health = health
        self._log = TemporaryFile()  # noqa: SIM115 - closed by stop()
        began = time.perf_counter()
        self._process = subprocess.Popen(
            pinned(command, core),
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,  # not a pipe: a server that logs would block once it is full
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self._wait_until_healthy(began + 60.0)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.perf_counter() - began

    def stop(self) -> None:
        """Kill it and its descendants."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def cpu_ns(self) -> int:
        """Return the CPU time that it and its descendants have used so far, all threads included."""
        return sum(_cpu_ns(pid) for pid in tree(self.pid))

    def memory_kb(self) -> float:
        """Return its memory and its descendants': proportional if readable, else resident."""
        return sum(memory_kb(pid) for pid in tree(self.pid))

    def _wait_until_healthy(self, deadline: float) -> None:
        while not _healthy(self.port, self._health):
            if self._process.poll() is not None or time.perf_counter() > deadline:
                self._log.seek(0)
                output = self._log.read().decode(errors="replace")[-2000:]
                raise StartError(f"expected a healthy server on port {self.port}, got:\n{output}")
            time.sleep(0.005)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Yield a server and stop it at the end."""
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a port that nothing listens on, below those that the system assigns to outgoing connections.

    Raises:
        StartError: No port was free.
    """
    for port in random.sample(_PORTS, 100):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise StartError(f"expected a free port between {_PORTS[0]} and {_PORTS[-1]}, got none in 100 attempts")


def pinned(command: Sequence[str], core: int | None) -> list[str]:
    """Return the command pinned to `core`; unchanged if it is None."""
    return list(command) if core is None else ["taskset", "-c", str(core), *command]


def run(command: Sequence[str], env: Mapping[str, str], core: int | None, timeout_s: float = 120.0) -> str:
    """Run a process to its end and return its output.

    Raises:
        StartError: The process failed, or took too long.
    """
    process = subprocess.Popen(
        pinned(command, core),
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        output = err.decode(errors="replace")[-2000:]
        raise StartError(f"expected {command[-1]!r} to end within {timeout_s:g} s, got:\n{output}") from None
    if process.returncode:
        raise StartError(f"expected {command[-1]!r} to run, got:\n{err.decode(errors='replace')[-2000:]}")
    return out.decode()


def _healthy(port: int, health: bool) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as sock:
            if not health:
                return True
            sock.sendall(
                f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
            )
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


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process; Linux derives the number of its clock from its id."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0  # it has ended


def memory_kb(pid: int) -> float:
    """Return the memory of a process in kB: proportional if readable, else resident."""
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return float(line.split()[1])
    return 0.0
