"""A server that is looked at as it serves: what it holds, here or in a container."""

import inspect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from openenv_core.checker.check import CheckError, NotApplicableError, needs
from openenv_core.checker.subject import Subject
from openenv_core.checker.subject_servers import RunningServer
from openenv_core.checker.watching import hook, inside
from openenv_core.errors import ProviderError
from openenv_core.targets import TargetKind


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds.

    Attributes:
        memory: Bytes of memory that are its own.
        threads: Threads.
        files: Open files and sockets.
        processes: Processes; each has threads and files too.
    """

    memory: int
    threads: int
    files: int
    processes: int

    @property
    def things(self) -> tuple[int, int, int]:
        """All but the memory, which never rests."""
        return self.threads, self.files, self.processes


def read_usage(server: RunningServer) -> Held:
    """Look at what a server holds just now."""
    try:
        import psutil
    except ImportError as error:
        raise needs("psutil", error) from error
    memory = threads = files = processes = 0
    for pid in server.pids():
        with suppress(psutil.Error):
            process: Any = psutil.Process(pid)
            memory += process.memory_info().rss
            threads += process.num_threads()
            files += process.num_fds()
            processes += 1
    return Held(memory, threads, files, processes)


PYTHON: Final = "python3"
NOTES: Final = "/tmp/ropewalk-collected"

BEGIN: Final = """\
import os, sys
folder = "/tmp/ropewalk-check"
os.makedirs(folder, exist_ok=True)
with open(folder + "/sitecustomize.py", "w") as file:
    file.write(sys.argv[1])
path = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = folder + (os.pathsep + path if path else "")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Puts the hook in front of the server's interpreter, and becomes the image's own command."""


def options_for(image: str) -> dict[str, Any]:
    """Return the options of a container whose interpreters throw their garbage away when told to.

    Raises:
        NotApplicableError: The image's command cannot be put after another.
    """
    from openenv_core.providers.docker.engine import DockerEngine

    config = DockerEngine.find().call("GET", f"/images/{image}/json").get("Config") or {}
    if config.get("Entrypoint") or not config.get("Cmd"):
        raise NotApplicableError(
            "the image has an ENTRYPOINT, before which nothing can be put that looks into its server; with CMD "
            "alone there can"
        )
    return {
        "command": [PYTHON, "-c", BEGIN, inspect.getsource(hook), *config["Cmd"]],
        "env_vars": {hook.COLLECTED: NOTES},
    }


def collect_garbage_in_container(server: RunningServer) -> None:
    """Tell the processes of a server to throw their garbage away, and wait until they have.

    Raises:
        NotApplicableError: None of them listens.
    """
    if not _run(server, "collect", NOTES).get("told"):
        raise NotApplicableError("the server's interpreter cannot be told to throw its garbage away")


def read_usage_in_container(server: RunningServer) -> Held:
    """Look at what a server holds just now.

    Raises:
        NotApplicableError: The container has no Python to look with.
    """
    return Held(**_run(server, "look"))


def _run(server: RunningServer, *arguments: str) -> dict[str, Any]:
    from openenv_core.providers.docker.engine import DockerEngine

    container, engine = server.container, DockerEngine.find()
    command = [PYTHON, "-I", "-c", inspect.getsource(inside), *arguments]
    # With a terminal the engine sends what is printed as it is, without headers of its own.
    body = {"Cmd": command, "AttachStdout": True, "Tty": True}
    try:
        started = engine.call("POST", f"/containers/{container.id}/exec", body=body)["Id"]
        found = engine.call("POST", f"/exec/{started}/start", body={"Detach": False, "Tty": True})
    except ProviderError as error:
        raise NotApplicableError(f"the container cannot be looked into: {error}") from error
    if not isinstance(found, dict):
        raise NotApplicableError(f"the container cannot be looked into: it has no {PYTHON} that answers")
    return found


MIB: Final = 1 << 20

ALLOWED: Final = 768 * MIB
"""Bytes that a server may take beyond what it began with."""

POLL_INTERVAL_S: Final = 0.02


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
            with suppress(NotApplicableError):
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
        while not self._over.wait(POLL_INTERVAL_S):
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


COLLECT_TIMEOUT_S: Final = 5.0
"""Seconds that a process may take to throw its garbage away, unless it is busy with something else."""


@contextmanager
def hooked() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder for notes, and the environment variables that put the hook into a server."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-check-") as text:
        folder = Path(text)
        shutil.copyfile(hook.__file__, folder / "sitecustomize.py")
        path = os.pathsep.join(part for part in (text, os.environ.get("PYTHONPATH")) if part)
        yield folder, {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def collecting(folder: Path) -> Mapping[str, str]:
    """Return the further variables that make a server's processes throw their garbage away when told to."""
    return {hook.COLLECTED: str(folder / "collected")}


def collect_garbage(server: RunningServer, folder: Path) -> None:
    """Tell the processes of a server to throw their garbage away, and wait until they have."""
    notes = folder / "collected"
    told = 0
    notes.write_text("", encoding="utf-8")
    for pid in server.pids():
        if _listens(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, hook.COLLECT)
                told += 1
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    while len(notes.read_text(encoding="utf-8").split()) < told and time.monotonic() < deadline:
        time.sleep(0.01)


def _listens(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (hook.COLLECT - 1) & 1)
    return False


SETTLE_INTERVAL_S: Final = 0.1
"""Pause between two looks at what is held; two that are alike count."""

SETTLE_TIMEOUT_S: Final = 2.0
"""Seconds after which the last look counts, whatever it was."""


@dataclass(frozen=True, slots=True)
class WatchedServer:
    """A server of one's own, and how it is looked at.

    Attributes:
        server: The server.
        collect: Has its processes throw their garbage away.
        held: Looks at what they hold.
    """

    server: RunningServer
    collect: Callable[[], None]
    held: Callable[[], Held]

    def settled(self) -> Held:
        """Look at what the server holds, once what has ended is gone."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        time.sleep(SETTLE_INTERVAL_S)  # the last sessions are being closed
        self.collect()
        first = self.held()
        while time.monotonic() < deadline:
            time.sleep(SETTLE_INTERVAL_S)
            second = self.held()
            if second.things == first.things:
                return second
            first = second
        return first


@contextmanager
def watching(subject: Subject) -> Iterator[WatchedServer]:
    """Start a server that can be looked at.

    Raises:
        NotApplicableError: What it holds cannot be seen from here.
    """
    if subject.kind is TargetKind.URL:
        raise NotApplicableError("what a server at a URL holds cannot be seen from here")
    if subject.kind is TargetKind.IMAGE:
        with _in_container(subject) as server:
            yield WatchedServer(
                server,
                partial(collect_garbage_in_container, server),
                partial(read_usage_in_container, server),
            )
        return
    with ExitStack() as stack:
        folder, env_vars = stack.enter_context(hooked())
        env_vars.update(collecting(folder))
        server = stack.enter_context(subject.server(env_vars=env_vars))
        yield WatchedServer(server, partial(collect_garbage, server, folder), partial(read_usage, server))


@contextmanager
def _in_container(subject: Subject) -> Iterator[RunningServer]:
    assert subject.url  # a container that does not start by itself is another check's to tell
    options = options_for(subject.target.text)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(subject.server(docker_options=options))
        except CheckError as error:
            raise NotApplicableError(
                f"the image starts, but not so that it can be looked into: {error}"
            ) from error
        yield server
