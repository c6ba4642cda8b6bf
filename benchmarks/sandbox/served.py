"""Measures the code interpreter through its server: executions of our client, and sessions that clients abandon."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.harness import BenchmarkError, progress
from benchmarks.processes import Server, kill, serve_command, serving, start, tree
from benchmarks.sandbox.engine import CODE, WARM_UP
from envs.code_interpreter_env import CodeInterpreterEnv

APP: Final = "envs.code_interpreter_env.server.app:app"
READY: Final = "abandon them now"
RECLAIM_TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.02


@contextmanager
def server(
    level: str, preload: str = "none", max_sessions: int | None = None
) -> Iterator[tuple[Server, str]]:
    """Run a server at one level; yields it and its temporary folder.

    Raises:
        BenchmarkError: The server did not start.
    """
    with TemporaryDirectory(prefix="ropewalk-bench-") as temporary:
        # Sessions that run as another user have their folders in it.
        Path(temporary).chmod(0o711)
        env = {
            "CODE_INTERPRETER_STRONGEST_ISOLATION": level,
            "CODE_INTERPRETER_MINIMUM_ISOLATION": level,
            "CODE_INTERPRETER_PRELOAD": preload,
            "CODE_INTERPRETER_PACKAGES": preload,
            "TMPDIR": temporary,
        }
        if max_sessions is not None:
            env["ROPEWALK_MAX_SESSIONS"] = str(max_sessions)
        with serving(serve_command(APP), env) as running:
            yield running, temporary


async def executions(running: Server, count: int) -> list[float]:
    """Execute in one session; returns the ms of each execution."""
    durations = []
    async with CodeInterpreterEnv(base_url=running.url) as env:
        await env.reset()
        for _ in range(WARM_UP + count):
            start_time = time.perf_counter()
            result = await env.execute(CODE)
            durations.append((time.perf_counter() - start_time) * 1e3)
            assert result.observation.result == "2", result
    return durations[WARM_UP:]


def abandon(level: str, count: int, wave: int) -> dict[str, float]:
    """Abandon sessions of a real server, wave after wave; returns what is left of them, by figure.

    The server has few more slots than a wave has sessions, so leaked slots fail the next wave.

    Args:
        level: Isolation level.
        count: Number of sessions.
        wave: Sessions at once.

    Raises:
        BenchmarkError: The server did not start, or refused a session.
    """
    with server(level, max_sessions=wave + 8) as (running, temporary):

        def resources() -> dict[str, int]:
            # os.walk takes folders that are removed meanwhile for empty ones.
            files = sum(len(folders) + len(names) for _, folders, names in os.walk(temporary))
            descriptors = len(list(Path(f"/proc/{running.pid}/fd").iterdir()))
            return {"processes": len(tree(running.pid)), "files": files, "descriptors": descriptors}

        _abandon_wave(running.port, 2)
        _settle(running.pid)
        before = resources()
        for done in range(0, count, wave):
            progress(f"abandon: {level}, {done} of {count}")
            _abandon_wave(running.port, min(wave, count - done))
        deadline = time.monotonic() + RECLAIM_TIMEOUT_S
        while True:
            left = {f"{name} left": float(max(0, now - before[name])) for name, now in resources().items()}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(POLL_INTERVAL_S)


def _abandon_wave(port: int, count: int) -> None:
    """Start a client that opens and uses sessions, and kill it."""
    command = [sys.executable, "-m", "benchmarks.sandbox.abandoning_client", str(port), str(count)]
    client = start(command, {}, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        if client.stdout.readline().decode().strip() != READY:
            raise BenchmarkError(f"expected {count} sessions on port {port}, and the client did not get them")
    finally:
        kill(client)
        client.communicate()


def _settle(pid: int) -> None:
    """Wait until a server's number of processes has been stable for 0.5 s."""
    count, since = -1, time.perf_counter()
    while time.perf_counter() - since < 0.5:
        if (now := len(tree(pid))) != count:
            count, since = now, time.perf_counter()
        time.sleep(POLL_INTERVAL_S)
