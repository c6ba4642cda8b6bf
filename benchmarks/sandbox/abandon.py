"""Sessions that are opened, used, and left behind by clients that are killed: what is left of them, and how long."""

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
    """What became of abandoned sessions.

    Attributes:
        sessions: How many there were.
        opened_s: Seconds that opening and using them took, all waves together.
        reclaimed_s: Seconds from the last client's end until nothing was left; None: something was.
        processes: Processes that are left beside those that were there before.
        files: Entries that are left in the server's temporary folder.
        descriptors: Files that the server has open beside those from before.
    """

    sessions: int
    opened_s: float
    reclaimed_s: float | None
    processes: int
    files: int
    descriptors: int


def abandon(level: str, count: int, wave: int, progress: Callable[[str], None]) -> Leftovers:
    """Abandon sessions of a real server, wave after wave.

    The server takes little more than one wave at once, so a slot that does not come back fails the next one.

    Args:
        level: Where code runs.
        count: How many.
        wave: How many at once.
        progress: Told how far it is.

    Raises:
        StartError: The server did not come up, or refused a session.
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
    """Have a client open and use sessions, and kill it."""
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
    """Wait until a server has had the same processes for a while."""
    count, since = -1, time.perf_counter()
    while time.perf_counter() - since < 0.5:
        if (now := len(tree(pid))) != count:
            count, since = now, time.perf_counter()
        time.sleep(POLL_INTERVAL_S)


def _entries(folder: str) -> int:
    # Folders vanish while it looks, which this takes for empty ones.
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))
