"""Sessions abandoned by clients that are killed: what is left of them, and how long cleanup takes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.sandbox.processes import descriptors
from benchmarks.sandbox.served import server
from benchmarks.wire.processes import ROOT, StartError, tree

READY: Final = "abandon them now"
RECLAIM_TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What abandoned sessions have left behind.

    Attributes:
        sessions: Number of abandoned sessions.
        opened_s: Seconds to open and use them, all waves together.
        reclaimed_s: Seconds from the last client's end until nothing was left; None if something was.
        processes: Additional processes.
        files: Additional entries in the server's temporary folder.
        descriptors: Additional open files of the server.
    """

    sessions: int
    opened_s: float
    reclaimed_s: float | None
    processes: int
    files: int
    descriptors: int


def abandon(level: str, count: int, wave: int, progress: Callable[[str], None]) -> Leftovers:
    """Abandon sessions of a real server, wave after wave.

    The server has few more slots than a wave has sessions, so leaked slots fail the next wave.

    Args:
        level: Isolation level.
        count: Number of sessions.
        wave: Sessions at once.
        progress: Called with a line about each wave.

    Raises:
        StartError: The server did not start, or refused a session.
    """
    with server(level, max_sessions=wave + 8) as (running, temporary):
        _wave(running.port, 2)
        _settle(running.pid)
        processes, open_files = len(tree(running.pid)), descriptors(running.pid)
        files = _entries(temporary)
        opened, done = 0.0, 0
        while done < count:
            progress(f"abandon: {level}, {done} of {count}")
            batch = min(wave, count - done)
            start_time = time.perf_counter()
            _wave(running.port, batch)
            opened += time.perf_counter() - start_time
            done += batch
        start_time = time.perf_counter()

        def left() -> tuple[int, int, int]:
            return (
                len(tree(running.pid)) - processes,
                _entries(temporary) - files,
                descriptors(running.pid) - open_files,
            )

        while max(remaining := left()) > 0 and time.perf_counter() - start_time < RECLAIM_TIMEOUT_S:
            time.sleep(POLL_INTERVAL_S)
        return Leftovers(
            sessions=count,
            opened_s=opened,
            reclaimed_s=time.perf_counter() - start_time if max(remaining) <= 0 else None,
            processes=max(0, remaining[0]),
            files=max(0, remaining[1]),
            descriptors=max(0, remaining[2]),
        )


def _wave(port: int, count: int) -> None:
    """Start a client that opens and uses sessions, and kill it."""
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sandbox.abandoning_client", str(port), str(count)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert client.stdout is not None
        if client.stdout.readline().strip() != READY:
            raise StartError(f"expected {count} sessions on port {port}, and the client did not get them")
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate()


def _settle(pid: int) -> None:
    """Wait until a server's number of processes has been stable for 0.5 s."""
    count, since = -1, time.perf_counter()
    while time.perf_counter() - since < 0.5:
        if (now := len(tree(pid))) != count:
            count, since = now, time.perf_counter()
        time.sleep(POLL_INTERVAL_S)


def _entries(folder: str) -> int:
    # os.walk takes folders that are removed meanwhile for empty ones.
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))
