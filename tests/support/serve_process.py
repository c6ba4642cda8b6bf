"""`ropewalk serve` as a separate process, observed from outside."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

SUPPORT = str(Path(__file__).parent)
WAIT_TIMEOUT_S = 60.0


class ServeProcess:
    """A running server.

    Attributes:
        process: The server's process; with workers, the supervisor's.
        port: Port that it listens on.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.port = 0
        self._lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line)
            if (at := line.find("http://")) >= 0:
                self.port = int(line[at:].split()[0].rpartition(":")[2])
                break
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.request("GET", path, None, **headers)

    def request(self, method: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_TIMEOUT_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), named)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_TIMEOUT_S)

    def ended(self) -> int:
        """Wait for the end; return the exit status."""
        status = self.process.wait(WAIT_TIMEOUT_S)
        self._reader.join(WAIT_TIMEOUT_S)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(self.process.stdout)


@contextmanager
def serve(
    *words: str, app: str = "counter:app", cwd: str | Path = SUPPORT, **environ: str
) -> Iterator[ServeProcess]:
    """Run `ropewalk serve` and wait until it is healthy; afterwards end it and its descendants."""
    command = [sys.executable, "-m", "openenv_core.cli", "serve", app, "--port", "0", *words]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        server = ServeProcess(process)
        if not server.port:
            raise AssertionError(f"expected a server, got: {server.output}")
        eventually(lambda: _answers(server))
        family = server.family
        yield server
        if process.poll() is None:
            family = server.family
            process.terminate()
        server.ended()
    finally:
        for left in family:
            if left.is_running() and left.status() != psutil.STATUS_ZOMBIE:
                left.kill()
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _answers(server: ServeProcess) -> bool:
    try:
        server.get("/health")
    except OSError:
        assert server.process.poll() is None, server.output
        return False
    return True


def eventually(condition: Callable[[], T], within_s: float = WAIT_TIMEOUT_S) -> T:
    """Wait until a condition is true; return its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"expected it to come about within {within_s:g} s"
        time.sleep(0.01)
    return value


def gone(process: psutil.Process | int) -> bool:
    """Return whether a process has ended, zombies included; a pid must not have been reused."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_refused_server(
    *words: str, app: str = "counter:app", pass_fds: tuple[int, ...] = (), **environ: str
) -> tuple[int, str]:
    """Run `ropewalk serve` where it refuses to start; return its exit status and output."""
    # Port 0, so that an occupied port is not the reason.
    port = () if "--fd" in words else ("--port", "0")
    done = subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", "serve", app, *port, *words],
        cwd=SUPPORT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_TIMEOUT_S,
        pass_fds=pass_fds,
    )
    return done.returncode, done.stdout
