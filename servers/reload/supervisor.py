"""Has the socket, watches the source, and starts the server anew when that changes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from socket import socket
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.providers import _guard
from servers.reload.plan import FAILED, VARIABLE, ReloadPlan

SUFFIXES: Final = frozenset({".py", ".yaml", ".yml", ".json"})

IGNORED: Final = frozenset(
    {
        "__pycache__",
        "build",
        "dist",
        "htmlcov",
        "logs",
        "node_modules",
        "output",
        "outputs",
        "runs",
        "site-packages",
        "tests",
        "venv",
    }
)
"""Folders inside an environment's that nothing is served from; so are those whose names begin with a dot."""


class SourceFilter:
    """Tells a change of the source from all the others in its folders.

    Args:
        roots: The folders that are watched.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(roots)

    def __call__(self, change: object, path: str) -> bool:
        """Whether a change of this file is one of the source."""
        file = Path(path)
        return file.suffix in SUFFIXES and any(self._counts(file, root) for root in self._roots)

    def _counts(self, file: Path, root: Path) -> bool:
        if not file.is_relative_to(root):
            return False
        *folders, name = file.relative_to(root).parts
        return not name.startswith(".") and not any(
            folder in IGNORED or folder.startswith(".") or folder.endswith(".egg-info") for folder in folders
        )


LOOK_MS: Final = 100
"""How often the server is looked at while nothing changes."""

SETTLE_MS: Final = 50
"""A change is acted upon once so long no other has come: programs write several files at once."""

KILL_AFTER_DRAIN_S: Final = 4.0
"""Seconds beyond the drain after which a server is killed; it ends itself sooner."""

_DEADLINE_MARGIN_S: Final = 5.0
_NAMES_SHOWN: Final = 5


class Reloader:
    """Keeps one server running, of the source as it stands.

    Args:
        plan: What the server is told.
        listener: The socket that it listens on. It stays open here, so connections that come while there is no
            server wait for the next one.
        folders: What to watch.
        say: Prints a line for whoever sits before it.
    """

    def __init__(
        self, plan: ReloadPlan, listener: socket, folders: Sequence[Path], say: Callable[[str], None]
    ) -> None:
        self._plan = replace(plan, listener=listener.fileno())
        self._folders = folders
        self._say = say
        self._stop = threading.Event()
        self._interrupts = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._waiting = False
        self._grace_s = plan.settings.drain_s + KILL_AFTER_DRAIN_S

    def run(self) -> int:
        """Serve until a signal says to stop.

        Raises:
            ConfigurationError: The source cannot be watched.
        """
        watch = watcher()
        with self._signals():
            try:
                changes = watch(
                    *self._folders,
                    watch_filter=SourceFilter(self._folders),
                    step=SETTLE_MS,
                    rust_timeout=LOOK_MS,
                    yield_on_timeout=True,
                    stop_event=self._stop,
                )
                self._follow(changes)
            except OSError as error:
                raise ConfigurationError(
                    f"expected to watch {', '.join(map(str, self._folders))}, got: {error}; "
                    "where the system's watches are too few, set WATCHFILES_FORCE_POLLING=1"
                ) from error
            finally:
                self._end()
        return 0

    def _follow(self, changes: Iterable[set[tuple[Any, str]]]) -> None:
        for found in changes:
            if self._stop.is_set():
                return
            if found:
                self._reload(sorted({Path(path) for _, path in found}))
            elif self._guard is None and not self._waiting:
                self._start()  # not before the watch stands: it would miss what changes in between
            else:
                self._look()

    def _reload(self, files: Sequence[Path]) -> None:
        names = [self._name(file) for file in files[:_NAMES_SHOWN]]
        more = f" and {len(files) - len(names)} more" if len(files) > len(names) else ""
        self._say(f"ropewalk: {', '.join(names)}{more} changed; restarting")
        self._end()
        _forget(files)
        if not self._stop.is_set():
            self._plan = replace(self._plan, again=True)
            self._start()

    def _name(self, file: Path) -> str:
        for folder in self._folders:
            if file.is_relative_to(folder):
                return str(file.relative_to(folder))
        return str(file)

    def _start(self) -> None:
        fd = str(self._plan.listener)
        guard = (sys.executable, "-I", "-S", _guard.__file__, str(self._grace_s), fd)
        self._waiting = False
        self._guard = subprocess.Popen(
            [*guard, sys.executable, "-m", "servers.reload.worker"],
            stdin=subprocess.PIPE,
            env={**os.environ, VARIABLE: self._plan.text()},
            pass_fds=(self._plan.listener,),
            start_new_session=True,
        )

    def _look(self) -> None:
        if self._guard is not None and (status := self._guard.poll()) is not None:
            self._end()
            self._waiting = True
            became = "could not start" if status == FAILED else f"ended with status {status}"
            self._say(f"ropewalk: the server {became}; waiting for the next change")

    def _end(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        deadline_s = self._grace_s + _DEADLINE_MARGIN_S
        while guard.poll() is None and deadline_s > 0 and self._interrupts < 2:
            with suppress(subprocess.TimeoutExpired):
                guard.wait(LOOK_MS / 1000)
            deadline_s -= LOOK_MS / 1000
        if guard.poll() is None:
            guard.kill()  # and the kernel the server with it
        guard.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, self._signalled)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _: object) -> None:
        self._interrupts += number == signal.SIGINT
        self._stop.set()


def watcher() -> Callable[..., Any]:
    """Return what watches folders.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from watchfiles import watch
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"expected the package watchfiles for --reload, got: {error}; pip install 'ropewalk[author]'"
        ) from error
    return watch


def _forget(files: Iterable[Path]) -> None:
    """Remove what was compiled of files: within a second, and at the same length, Python sees no change."""
    for file in files:
        if file.suffix == ".py":
            with suppress(OSError, NotImplementedError):
                Path(cache_from_source(str(file))).unlink()
