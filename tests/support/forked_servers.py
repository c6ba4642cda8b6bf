"""BlackJack servers that start in milliseconds as forks of one process, for tests that kill many."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class ForkedServers:
    """Servers, each in its own process.

    Attributes:
        urls: Their URLs.
    """

    def __init__(self, parent: "subprocess.Popen[str]", count: int) -> None:
        self._parent = parent
        self._pids: dict[str, int] = {}
        for _ in range(count):
            self._start(0)
        self.urls = list(self._pids)

    def kill(self, url: str) -> None:
        """Kill a server; its URL then refuses connections."""
        os.kill(self._pids[url], signal.SIGKILL)

    def restart(self, url: str) -> None:
        """Start another server at the URL of a killed one, once that has ended."""
        self._start(int(url.rpartition(":")[2]))

    def _start(self, port: int) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{port}\n")
        self._parent.stdin.flush()
        pid, where = self._parent.stdout.readline().split()
        self._pids[f"http://127.0.0.1:{where}"] = int(pid)


@contextmanager
def forked_servers(count: int, *, deterministic: bool) -> Iterator[ForkedServers]:
    """Serve BlackJack from several processes, which end with the block."""
    command = [sys.executable, __file__, *(["deterministic"] if deterministic else [])]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        yield ForkedServers(parent, count)


def _listen(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:  # the previous process has not ended yet
            os.sched_yield()


def _main(*, deterministic: bool) -> None:
    sys.path.insert(0, str(ROOT))
    import uvicorn

    from envs.blackjack_env.models import BlackjackAction, BlackjackObservation, BlackjackState
    from envs.blackjack_env.server.environment import BlackjackEnvironment
    from servers import create_app
    from servers.hosting import SETTINGS

    env = type("Game", (BlackjackEnvironment,), {"DETERMINISTIC": deterministic})
    models = (BlackjackAction, BlackjackObservation)
    app = create_app(env, *models, state_cls=BlackjackState, max_concurrent_envs=64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        listener = _listen(int(line))
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            config = uvicorn.Config(app, log_level="warning", **SETTINGS)
            asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
            os._exit(0)
        children.append(pid)
        sys.stdout.write(f"{pid} {listener.getsockname()[1]}\n")
        sys.stdout.flush()
        listener.close()
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _main(deterministic="deterministic" in sys.argv)
