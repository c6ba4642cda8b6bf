"""A bound on a server's memory while it is ill-treated, so that it falls rather than this machine."""

import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from openenv_core.checker.check import NotApplicable
from openenv_core.checker.needs import needs
from openenv_core.checker.subject import RunningServer

MIB: Final = 1 << 20

ALLOWED: Final = 768 * MIB
"""Bytes that a server may take beyond what it began with."""

LOOK_S: Final = 0.02


class MemoryWatch:
    """Looks at a server's memory all the time, and kills one that takes too much. A context manager.

    Args:
        server: Whose; None, or one in a container, is not watched.

    Attributes:
        exceeded: The bytes beyond the beginning that it was killed at; None: it was not.
    """

    def __init__(self, server: RunningServer | None) -> None:
        try:
            import psutil
        except ImportError as error:
            raise needs("psutil", error) from error
        self._psutil = psutil
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="openenv-check-memory", daemon=True)
        self.exceeded: int | None = None
        self._before = 0

    def __enter__(self) -> Self:
        if self._server is not None:
            with suppress(NotApplicable):
                self._before = self._taken()
                self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._server is not None
        while not self._over.wait(LOOK_S):
            if (more := self._taken() - self._before) > ALLOWED:
                self.exceeded = more
                self._server.kill()
                return

    def _taken(self) -> int:
        assert self._server is not None
        total = 0
        for pid in self._server.pids():
            with suppress(self._psutil.Error):
                total += self._psutil.Process(pid).memory_info().rss
        return total
