"""`ropewalk serve --reload`: a server process that is restarted whenever its source changes.

The supervisor holds the listening socket and watches the files; it loads none of the author's code. The server is a
process under a guard (`python -m servers.reload`), so that neither it nor what it starts outlives the supervisor.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError, OpenEnvError, installed_with
from openenv_core.packages import module_command
from openenv_core.tracebacks import authors_part, show
from servers.listening import handling_stop_signals
from servers.settings import ServePlan

_VARIABLE: Final = "ROPEWALK_RELOAD"
"""Variable that passes the plan, tokens included, to the server: the guard passes no descriptor but the socket."""

_FAILED: Final = 2
"""Exit status of a server that could not be loaded and has printed why."""

_POLL_INTERVAL_MS: Final = 100
"""Interval in ms at which the server is checked while nothing changes."""

_SETTLE_MS: Final = 50
"""Time in ms without further changes after which the server is restarted: programs write several files at once."""

_KILL_AFTER_DRAIN_S: Final = 4.0
"""Seconds after the drain's deadline at which a server is killed; it ends itself earlier."""

_DEADLINE_MARGIN_S: Final = 5.0

_SUFFIXES: Final = frozenset({".py", ".yaml", ".yml", ".json"})

_IGNORED: Final = frozenset(
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
"""Subfolders that hold no source of the server; those whose names begin with a dot are ignored too."""


_RESTARTED: Final = "again"
"""Argument of a server process that is not the first."""


def _is_source(file: Path, root: Path) -> bool:
    if file.suffix not in _SUFFIXES or not file.is_relative_to(root):
        return False
    *folders, name = file.relative_to(root).parts
    return not name.startswith(".") and not any(
        folder in _IGNORED or folder.startswith(".") or folder.endswith(".egg-info") for folder in folders
    )


class Reloader:
    """Keeps one server running with the current source.

    Args:
        plan: The plan for the server.
        listener: The listening socket. It stays open here, so that connections made while no server runs wait for the
            next one.
        folders: Folders to watch.
        report: Prints a line for the user.
    """

    def __init__(
        self, plan: ServePlan, listener: socket.socket, folders: Sequence[Path], report: Callable[[str], None]
    ) -> None:
        self._plan = replace(plan, listener=listener.fileno())
        self._restart_arguments: tuple[str, ...] = ()
        self._folders = folders
        self._report = report
        self._stop = threading.Event()
        self._interrupts = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._waiting = False
        self._grace_s = plan.settings.drain_s + _KILL_AFTER_DRAIN_S

    def run(self) -> int:
        """Serve until a signal requests the end. ConfigurationError: The source cannot be watched."""
        watch = watcher()
        with handling_stop_signals(self._on_signal):
            try:
                for changed_paths in watch(
                    *self._folders,
                    watch_filter=lambda _, path: any(_is_source(Path(path), root) for root in self._folders),
                    step=_SETTLE_MS,
                    rust_timeout=_POLL_INTERVAL_MS,
                    yield_on_timeout=True,
                    stop_event=self._stop,
                ):
                    self._follow(sorted({Path(path) for _, path in changed_paths}))
            except OSError as error:
                raise ConfigurationError(
                    f"expected to watch {', '.join(map(str, self._folders))}, got: {error}; "
                    "where the system's watches are too few, set WATCHFILES_FORCE_POLLING=1"
                ) from error
            finally:
                self._end()
        return 0

    def _follow(self, changed: Sequence[Path]) -> None:
        if self._stop.is_set():
            return
        if changed:
            self._reload(changed)
        elif self._guard is None and not self._waiting:
            self._start()  # only once the watch is set up, so that no change is missed
        else:
            self._check_server()

    def _reload(self, files: Sequence[Path]) -> None:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self._report(f"ropewalk: {'/'.join(files[0].parts[-2:])}{more} changed; restarting")
        self._end()
        _remove_bytecode(files)
        if not self._stop.is_set():
            self._restart_arguments = (_RESTARTED,)
            self._start()

    def _start(self) -> None:
        from openenv_core.guard import guard_command

        command = (*module_command("servers.reload"), *self._restart_arguments)
        self._waiting = False
        self._guard = subprocess.Popen(
            guard_command(command, grace_s=self._grace_s, inherited_fd=self._plan.listener),
            stdin=subprocess.PIPE,
            env={**os.environ, _VARIABLE: self._plan.to_json().decode()},
            pass_fds=(self._plan.listener,),
            start_new_session=True,
        )

    def _check_server(self) -> None:
        if self._guard is not None and (status := self._guard.poll()) is not None:
            self._end()
            self._waiting = True
            outcome = "could not start" if status == _FAILED else f"ended with status {status}"
            self._report(f"ropewalk: the server {outcome}; waiting for the next change")

    def _end(self) -> None:
        if (guard := self._guard) is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(self._grace_s + _DEADLINE_MARGIN_S)
        except subprocess.TimeoutExpired:
            guard.kill()  # the kernel then kills the server
            guard.wait()
        self._guard = None

    def _on_signal(self, number: int, _: object) -> None:
        self._interrupts += number == signal.SIGINT
        self._stop.set()
        if self._interrupts > 1 and self._guard is not None:
            self._guard.kill()


def watcher() -> Callable[..., Any]:
    """Return `watchfiles.watch`. ConfigurationError: It is not installed."""
    with installed_with("author", "the package watchfiles for --reload"):
        from watchfiles import watch
    return watch


def _remove_bytecode(files: Iterable[Path]) -> None:
    """Remove the bytecode of files: Python misses changes within a second that leave the length as it was."""
    for file in files:
        if file.suffix == ".py":
            with suppress(OSError, NotImplementedError):
                Path(cache_from_source(str(file))).unlink()


def main() -> int:
    """Load the app and serve it; if that fails, print why, and answer all requests with the reason."""
    plan = ServePlan.from_json(os.environ.pop(_VARIABLE))  # not for processes that the app starts
    os.set_inheritable(plan.listener, False)
    try:
        return _serve_source(plan)
    except OpenEnvError as error:
        print(f"ropewalk: {error}", file=sys.stderr, flush=True)  # noqa: T201
        reason = str(error)
    except Exception as error:
        show(error)
        reason = "".join(traceback.format_exception(error.with_traceback(authors_part(error))))
    print("ropewalk: the server could not start; waiting for the next change", flush=True)  # noqa: T201
    if plan.settings.exposed:
        reason = "the environment could not be loaded; the server's log tells why"
    return _serve_refusal(plan, reason)


def _serve_refusal(plan: ServePlan, reason: str) -> int:
    """Answer every request with 503 and the reason, until the supervisor ends this process."""
    try:
        from servers.hosting import Assembled, host
        from servers.security import HttpRefusalError, send_refusal
    except ModuleNotFoundError:
        return _FAILED

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await send_refusal(HttpRefusalError(503, reason), scope, send)

    with socket.socket(fileno=plan.listener) as listener:
        return host(Assembled(app), [listener], drain_s=0)


def _serve_source(plan: ServePlan) -> int:
    with installed_with("server", "a server's packages"):
        from servers.hosting import assemble, host
    from servers.logs import configure_logging

    assembled = assemble(plan.app, plan.settings, plan.options)
    configure_logging(plan.log_level, plan.settings.tokens)

    def on_started() -> None:
        if _RESTARTED in sys.argv[1:]:
            print("ropewalk: serving again", flush=True)  # noqa: T201

    with socket.socket(fileno=plan.listener) as listener:
        return host(assembled, [listener], drain_s=plan.settings.drain_s, on_started=on_started)


if __name__ == "__main__":
    sys.exit(main())
