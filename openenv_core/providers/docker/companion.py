"""Starts the sweeper beside this program, the companion process that removes its containers."""

import atexit
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from openenv_core.errors import ProviderError
from openenv_core.providers.docker.attach import EngineAddress
from openenv_core.providers.docker.sweeper import LABEL, RUN, owner

PROGRAM: Final = (
    "import sys; from openenv_core.providers.docker import sweeper; sys.exit(sweeper.main(sys.argv[1:]))"
)

EXIT_TIMEOUT_S: Final = 10.0
"""How long this process's exit waits for the removal of its containers. The companion continues after that."""

RESTART_DELAY_S: Final = 1.0
"""Pause before a dead companion is replaced."""


class Companion:
    """A companion process, and the thread that restarts it.

    Knows whether there were containers, so that the exit of a program without any does not wait for the engine.

    Attributes:
        labels: Labels of the containers that it removes.
    """

    def __init__(self, address: EngineAddress) -> None:
        # RUN: a program that execs another stays the same process, and its old companion lives on for a while.
        self.labels: Final = {LABEL: str(owner()), RUN: secrets.token_hex(8)}
        self._address = address
        self._closing = threading.Event()
        self._guard = threading.Lock()  # protects the process and its replacement
        self._changed = threading.Condition()
        self._creating_count = 0
        self._has_created = False
        self._process = self._spawn()
        threading.Thread(target=self._watch, name="openenv-companion", daemon=True).start()

    @property
    def pid(self) -> int:
        """The pid of the companion process."""
        return self._process.pid

    @contextmanager
    def guard_creation(self, name: str) -> Iterator[None]:
        """Delay this program's exit while the block creates a container.

        Raises:
            ProviderError: The program is exiting, and nobody would remove the container.
        """
        with self._changed:
            if self._closing.is_set():
                raise ProviderError(
                    f"expected a program that goes on, got one that is ending, to start {name}; "
                    "close what starts containers before the program's end"
                )
            self._creating_count += 1
            self._has_created = True
        try:
            yield
        finally:
            with self._changed:
                self._creating_count -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Tell the companion that no more containers will be created, and wait until the existing ones are removed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing.set()
            while self._creating_count and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            # A container may still be created: send only end of file, as if this program had died.
            message = b"" if self._creating_count else b"q" if self._has_created else b"n"
        with self._guard:
            if self._process.poll() is not None and message != b"n":
                self._replace()
            process = self._process
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            process.stdin.write(message)
            process.stdin.close()
        if message != b"n":
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # It finds the packages that this program finds, and none in the working directory that this one does not.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, json.dumps(self._address), *self.labels.values()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(f"expected to start the sweeper beside this program, got: {error}") from error

    def _replace(self) -> None:
        with suppress(ProviderError):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = self._spawn()

    def _watch(self) -> None:
        """Restart the companion when it dies."""
        while True:
            self._process.wait()
            if self._closing.wait(RESTART_DELAY_S):
                return
            with self._guard:
                if not self._closing.is_set():
                    self._replace()


_companions: dict[tuple[int, EngineAddress], Companion] = {}
_lock = threading.Lock()


def ensure(address: EngineAddress) -> Companion:
    """Return this process's companion for an engine, and start it if needed. It may not be ready yet.

    Raises:
        ProviderError: It could not be started.
    """
    with _lock:
        key = (os.getpid(), address)
        if key not in _companions:
            _companions[key] = Companion(address)
        return _companions[key]


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for (process, _), companion in list(_companions.items()):
        if process == os.getpid():
            companion.close(max(0.0, deadline - time.monotonic()))


def _in_fork() -> None:
    """Renew the lock in a fork: companions and threads belong to the parent."""
    global _lock
    _lock = threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_fork)
