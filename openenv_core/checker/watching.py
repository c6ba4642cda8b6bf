"""Measures the resources of a running server, local or in a container."""

import inspect
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from openenv_core.checker import inside
from openenv_core.checker.check import CheckError, NotApplicableError
from openenv_core.checker.subject import Subject, SubjectServer, container_of
from openenv_core.errors import ProviderError
from openenv_core.targets import TargetKind

MIB: Final = 1 << 20

_ALLOWED_BYTES: Final = 768 * MIB
"""Memory that a server may allocate beyond its initial usage, in bytes."""

_POLL_INTERVAL_S: Final = 0.02

_SETTLE_INTERVAL_S: Final = 0.1
"""Seconds between two measurements; they are repeated until two agree."""

_SETTLE_TIMEOUT_S: Final = 2.0
"""Seconds after which the last measurement is taken."""

_PYTHON: Final = "python3"

_NOTES_IN_CONTAINER: Final = "/tmp/ropewalk-collected"

_BOOTSTRAP: Final = """\
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
"""Installs `inside` as the `sitecustomize` of the container's interpreters, and executes the image's command."""


def server_pids(server: SubjectServer) -> list[int]:
    """Return the ids of all processes of a provider's server, including those that the environment starts.

    Raises:
        NotApplicableError: The server runs in a container, whose processes are not visible.
    """
    guard = getattr(server, "pid", None)
    if guard is None:
        raise NotApplicableError("the processes of a container are not visible from here")
    return inside.descendants(guard)


def kill_server(server: SubjectServer) -> None:
    """Kill every process by SIGKILL, as when the machine runs out of memory; in a container, remove that."""
    if (container := container_of(server)) is not None:
        container.remove()
        return
    for pid in server_pids(server):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class WatchedServer:
    """A separate server that can be measured."""

    server: SubjectServer
    notes: str

    def measure_stable(self) -> dict[str, int]:
        """Measure the server's resources, as `inside.usage` does, once those of ended sessions are released.

        Raises:
            NotApplicableError: It runs in a container that cannot be inspected.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        time.sleep(_SETTLE_INTERVAL_S)  # the last sessions are being closed
        self._collect_garbage()
        first = self._measure()
        while time.monotonic() < deadline:
            time.sleep(_SETTLE_INTERVAL_S)
            second = self._measure()
            if {**second, "memory": 0} == {**first, "memory": 0}:  # memory keeps changing
                return second
            first = second
        return first

    def _collect_garbage(self) -> None:
        if container_of(self.server) is None:
            inside.collect_garbage(server_pids(self.server), self.notes)
        elif not self._run_inside("collect", self.notes).get("told"):
            raise NotApplicableError("the server's interpreter cannot be made to collect garbage")

    def _measure(self) -> dict[str, int]:
        if container_of(self.server) is None:
            return inside.usage(server_pids(self.server))
        return self._run_inside("look")

    def _run_inside(self, *arguments: str) -> dict[str, Any]:
        from openenv_core.providers.docker.engine import CALL_TIMEOUT_S, DockerEngine

        container, engine = container_of(self.server), DockerEngine.find()
        command = [_PYTHON, "-I", "-c", inspect.getsource(inside), *arguments]
        try:
            done = engine.execute(container.id, command, timeout_s=CALL_TIMEOUT_S, most=MIB)
        except ProviderError as error:
            raise NotApplicableError(f"the container cannot be inspected: {error}") from error
        try:
            answer = json.loads(done.output)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NotApplicableError(f"the container cannot be inspected: it has no working {_PYTHON}")
        return answer


@contextmanager
def watch_server(subject: Subject) -> Iterator[WatchedServer]:
    """Start a server that can be measured.

    Raises:
        NotApplicableError: Its resources cannot be measured.
    """
    if subject.kind is TargetKind.URL:
        raise NotApplicableError("the resources of a server at a URL cannot be measured")
    if subject.kind is TargetKind.IMAGE:
        with _start_container(subject) as server:
            yield WatchedServer(server, _NOTES_IN_CONTAINER)
        return
    with hook_folder() as (folder, env_vars):
        notes = str(folder / "collected")
        with subject.server(env_vars={**env_vars, inside.COLLECTED: notes}) as server:
            yield WatchedServer(server, notes)


@contextmanager
def _start_container(subject: Subject) -> Iterator[SubjectServer]:
    """Start a container whose interpreters collect garbage on request."""
    from openenv_core.providers.docker.engine import DockerEngine

    assert subject.url  # raises if the unmodified image does not start
    config = DockerEngine.find().call("GET", f"/images/{subject.target.text}/json").get("Config") or {}
    if config.get("Entrypoint") or not config.get("Cmd"):
        raise NotApplicableError(
            "the image has an ENTRYPOINT, or no CMD, so its server cannot be inspected; an image with CMD alone can be"
        )
    options = {
        "command": [_PYTHON, "-c", _BOOTSTRAP, inspect.getsource(inside), *config["Cmd"]],
        "env_vars": {inside.COLLECTED: _NOTES_IN_CONTAINER},
    }
    with ExitStack() as stack:
        try:
            server = stack.enter_context(subject.server(docker_options=options))
        except CheckError as error:
            raise NotApplicableError(f"the image starts, but cannot be inspected: {error}") from error
        yield server


@contextmanager
def hook_folder() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a temporary folder, and environment variables that install `inside` in a server's interpreters."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-check-") as text:
        folder = Path(text)
        shutil.copyfile(inside.__file__, folder / "sitecustomize.py")
        path = os.pathsep.join(entry for entry in (text, os.environ.get("PYTHONPATH")) if entry)
        yield folder, {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def limited_memory(server: SubjectServer | None) -> Iterator[list[int]]:
    """Kill the server if it allocates too much memory; yield a list that then contains the bytes allocated.

    Args:
        server: The server; None, or one in a container, is not watched.
    """
    excess: list[int] = []
    if server is None or container_of(server) is not None:
        yield excess
        return
    baseline = inside.usage(server_pids(server))["memory"]

    def check() -> None:
        growth = inside.usage(server_pids(server))["memory"] - baseline
        if growth > _ALLOWED_BYTES and not excess:
            excess.append(growth)
            kill_server(server)

    with poll("openenv-check-memory", check):
        yield excess


@contextmanager
def poll(name: str, check: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly during the block, in a thread of that name."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(_POLL_INTERVAL_S):
            check()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
