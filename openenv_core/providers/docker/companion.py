"""The companion of this process: removes its containers when it dies, whatever it dies of.

One companion an engine. It is started before the first container is, a new one takes the place of one that died,
and at this process's exit it removes what was not removed: no program has to close anything.
"""

import atexit
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from openenv_core.errors import ProviderError
from openenv_core.providers.docker._owner import owner
from openenv_core.providers.docker._wire import Address

SCRIPT: Final = Path(__file__).with_name("_companion.py")

EXIT_S: Final = 10.0
"""How long the exit of this process waits for its containers to be removed. The companion goes on."""

RESTART_S: Final = 1.0
"""Pause before a companion that died is replaced."""


class Companion:
    """One companion process and the thread that watches it."""

    def __init__(self, address: Address) -> None:
        self._command = [
            sys.executable,
            "-I",
            "-S",
            str(SCRIPT),
            address.url,
            address.certificates or "",
            "1" if address.verify else "0",
            str(owner()),
        ]
        self._closing = threading.Event()
        self._process = self._spawn()
        threading.Thread(target=self._watch, name="openenv-companion", daemon=True).start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def close(self, timeout_s: float) -> None:
        """Say that no more containers will be made, and wait until those that were are gone."""
        self._closing.set()
        process = self._process
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(b"q")
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(
                f"expected to start the companion that removes containers, got: {error}"
            ) from error

    def _watch(self) -> None:
        """Replace a companion that died."""
        while True:
            self._process.wait()
            if self._closing.wait(RESTART_S):
                return
            with suppress(ProviderError):
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process = self._spawn()


_companions: dict[tuple[int, Address], Companion] = {}
_lock = threading.Lock()


def ensure(address: Address) -> Companion:
    """Have a companion for an engine. It is there, if not yet ready, when this returns.

    Raises:
        ProviderError: It could not be started.
    """
    with _lock:
        key = (os.getpid(), address)
        if key not in _companions:
            _companions[key] = Companion(address)
        return _companions[key]


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_S
    for (process, _), companion in _companions.items():
        if process == os.getpid():
            companion.close(max(0.0, deadline - time.monotonic()))


def _in_fork() -> None:
    """Begin anew: the companions are the parent's, and its threads are not here."""
    global _lock
    _lock = threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_fork)
