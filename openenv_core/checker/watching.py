"""Measures the resources of a running server."""

import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openenv_core.checker import inside
from openenv_core.checker.check import NotApplicableError, import_package
from openenv_core.checker.subject import Subject, SubjectServer, container_of
from openenv_core.targets import TargetKind

MIB: Final = 1 << 20

_ALLOWED_BYTES: Final = 768 * MIB
"""Memory that a server may allocate beyond its initial usage, in bytes."""

_POLL_INTERVAL_S: Final = 0.02

_SETTLE_INTERVAL_S: Final = 0.1
"""Seconds between two measurements; they are repeated until two agree."""

_SETTLE_TIMEOUT_S: Final = 2.0
"""Seconds after which the last measurement is taken."""

_COLLECT_TIMEOUT_S: Final = 5.0
"""Seconds to wait until the processes have collected garbage; a busy process takes longer."""

_CAUGHT: Final = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


def server_pids(server: SubjectServer) -> list[int]:
    """Return the ids of all processes of a provider's server, including those that the environment starts.

    Raises:
        NotApplicableError: The server runs in a container, whose processes are not visible.
    """
    guard = getattr(server, "pid", None)
    if guard is None:
        raise NotApplicableError("the processes of a container are not visible from here")
    psutil = import_package("psutil")
    try:
        return [process.pid for process in psutil.Process(guard).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def measure_usage(pids: Iterable[int]) -> dict[str, int]:
    """Return the total memory in bytes, threads, and open files and sockets of processes, and the number alive."""
    psutil = import_package("psutil")
    totals = dict.fromkeys(("memory", "threads", "files", "processes"), 0)
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            values = process.memory_info().rss, process.num_threads(), process.num_fds(), 1
            for name, value in zip(totals, values, strict=True):
                totals[name] += value
    return totals


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
    notes: Path

    def measure_stable(self) -> dict[str, int]:
        """Measure the server's resources, as `measure_usage` does, once those of ended sessions are released."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        time.sleep(_SETTLE_INTERVAL_S)  # the last sessions are being closed
        self._collect_garbage()
        first = measure_usage(server_pids(self.server))
        while time.monotonic() < deadline:
            time.sleep(_SETTLE_INTERVAL_S)
            second = measure_usage(server_pids(self.server))
            if {**second, "memory": 0} == {**first, "memory": 0}:  # memory keeps changing
                return second
            first = second
        return first

    def _collect_garbage(self) -> None:
        """Signal the processes that can to collect garbage, and wait for them."""
        self.notes.write_bytes(b"")
        signalled = 0
        for pid in server_pids(self.server):
            with suppress(OSError):
                caught = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text(errors="replace"))
                # The signal would kill a process without a handler.
                if caught is not None and int(caught[1], 16) >> (inside.COLLECT - 1) & 1:
                    os.kill(pid, inside.COLLECT)
                    signalled += 1
        deadline = time.monotonic() + _COLLECT_TIMEOUT_S
        while len(self.notes.read_bytes().split()) < signalled and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)


@contextmanager
def watch_server(subject: Subject) -> Iterator[WatchedServer]:
    """Start a server that can be measured.

    Raises:
        NotApplicableError: Its resources cannot be measured.
    """
    if subject.kind in (TargetKind.URL, TargetKind.IMAGE):
        raise NotApplicableError(
            "only processes of this machine are measured: check the folder that the server is made from"
        )
    with hook_folder() as (folder, env_vars):
        notes = folder / "collected"
        with subject.server(env_vars={**env_vars, inside.COLLECTED: str(notes)}) as server:
            yield WatchedServer(server, notes)


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
    baseline = measure_usage(server_pids(server))["memory"]

    def check() -> None:
        growth = measure_usage(server_pids(server))["memory"] - baseline
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
