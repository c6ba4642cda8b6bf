"""Measures the resources of a running server."""

import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
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
    totals = Counter(memory=0, threads=0, files=0, processes=0)
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            memory, threads, files = process.memory_info().rss, process.num_threads(), process.num_fds()
            totals.update(memory=memory, threads=threads, files=files, processes=1)
    return totals


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
    with tempfile.TemporaryDirectory(prefix="ropewalk-check-") as text:
        shutil.copyfile(inside.__file__, Path(text, "sitecustomize.py"))
        env_vars = {
            "PYTHONPATH": os.pathsep.join(filter(None, (text, os.environ.get("PYTHONPATH")))),
            "PYTHONDONTWRITEBYTECODE": "1",
            inside.COLLECTED: str(Path(text, "collected")),
        }
        with subject.server(env_vars=env_vars) as server:
            yield WatchedServer(server, Path(env_vars[inside.COLLECTED]))


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
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(_POLL_INTERVAL_S) and not excess:
            growth = measure_usage(server_pids(server))["memory"] - baseline
            if growth > _ALLOWED_BYTES:
                excess.append(growth)
                for pid in server_pids(server):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, name="openenv-check-memory", daemon=True)
    thread.start()
    try:
        yield excess
    finally:
        stopped.set()
        thread.join()
