"""Workers whose callers come over a Unix socket, as the workers themselves do to each other. Real processes."""

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from serve_process import PATIENCE_S, SUPPORT, eventually

from servers.fleet.ids import worker_of

pytestmark = pytest.mark.soak

WORKERS = 2
SESSIONS = 12
"""With so many, some come in at a worker that is not theirs, however the connections are dealt out."""


@contextmanager
def fleet_at(path: Path) -> Iterator[psutil.Process]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        fd = listener.fileno()
        words = ["serve", "counter:app", "--fd", str(fd), "--workers", str(WORKERS)]
        command = [sys.executable, "-m", "openenv_core.cli", *words]
        process = subprocess.Popen(command, cwd=SUPPORT, pass_fds=(fd,), start_new_session=True)
    try:
        yield psutil.Process(process.pid)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            for left in psutil.Process(process.pid).children(recursive=True):
                left.kill()
            process.kill()
            process.wait()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def status(path: Path, method: str, target: str, session: str = "") -> int:
    """Ask on a connection of its own; return the status."""
    with closing(UnixConnection(path)) as connection:
        connection.request(method, target, headers={"X-OpenEnv-Session": session} if session else {})
        return connection.getresponse().status


def answers(path: Path) -> bool:
    try:
        return status(path, "GET", "/health") == 200
    except OSError:
        return False


def private_sockets(supervisor: psutil.Process) -> list[Path]:
    """Return the private sockets of the workers, in their order."""
    places = {
        str(connection.laddr)
        for worker in supervisor.children()
        for connection in worker.net_connections("unix")
    }
    return sorted(Path(place) for place in places if place.endswith(".sock"))


def test_a_session_is_with_its_worker_whichever_one_its_callers_meet(tmp_path: Path) -> None:
    public = tmp_path / "public"
    with fleet_at(public) as supervisor:
        eventually(lambda: answers(public))
        eventually(lambda: len(private_sockets(supervisor)) == WORKERS)
        private = private_sockets(supervisor)
        for session in (f"unix-{number}" for number in range(SESSIONS)):
            assert status(public, "POST", "/reset", session) == 200
            assert status(private[worker_of(session, WORKERS)], "GET", "/state", session) == 200
            assert status(public, "GET", "/state", session) == 200
