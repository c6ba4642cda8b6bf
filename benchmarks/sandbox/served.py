"""Measures the code interpreter through its server: executions of our client, and sessions that clients abandon."""

import asyncio
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
from benchmarks.processes import Server, cpu_s, kill, serve_command, serving, start, tree
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
        modules = preload if preload == "none" else preload.replace("+", ",")
        env = {
            "CODE_INTERPRETER_STRONGEST_ISOLATION": level,
            "CODE_INTERPRETER_MINIMUM_ISOLATION": level,
            "CODE_INTERPRETER_PRELOAD": modules,
            "CODE_INTERPRETER_PACKAGES": modules,
            "TMPDIR": temporary,
        }
        if max_sessions is not None:
            env["ROPEWALK_MAX_SESSIONS"] = str(max_sessions)
        with serving(serve_command(APP), env) as running:
            yield running, temporary


async def executions(running: Server, count: int) -> tuple[list[float], float]:
    """Execute in one session; returns the ms of each execution, and the CPU µs of server and interpreter for one."""
    async with CodeInterpreterEnv(base_url=running.url) as env:
        await env.reset()
        for _ in range(WARM_UP):
            await env.execute(CODE)
        before, durations = cpu_s([running.pid]), []
        for _ in range(count):
            start_time = time.perf_counter()
            result = await env.execute(CODE)
            durations.append((time.perf_counter() - start_time) * 1e3)
            assert result.observation.result == "2", result
        return durations, (cpu_s([running.pid]) - before) * 1e6 / count


async def throughput(running: Server, sessions: int, seconds: float) -> tuple[float, float]:
    """Execute in several sessions at once; returns executions/s, and the server-side CPU µs of one."""
    environments = [CodeInterpreterEnv(base_url=running.url) for _ in range(sessions)]
    end = 0.0

    async def work(env: CodeInterpreterEnv) -> int:
        count = 0
        while time.perf_counter() < end:
            result = await env.execute(CODE)
            assert result.observation.result == "2", result
            count += 1
        return count

    try:
        for env in environments:
            await env.connect()
            await env.reset()
        for length in (min(0.3, seconds), seconds):
            before, start_time = cpu_s([running.pid]), time.perf_counter()
            end = start_time + length
            count = sum(await asyncio.gather(*map(work, environments)))
            durations = time.perf_counter() - start_time
            cpu = cpu_s([running.pid]) - before
    finally:
        for env in environments:
            await env.close()
    return count / durations, cpu * 1e6 / count


def abandon(level: str, count: int, wave: int) -> dict[str, float | None]:
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
        before, start_time = resources(), time.perf_counter()
        for done in range(0, count, wave):
            progress(f"abandon: {level}, {done} of {count}")
            _abandon_wave(running.port, min(wave, count - done))
        opened_s, start_time = time.perf_counter() - start_time, time.perf_counter()
        while True:
            left = {f"{name} left": float(max(0, now - before[name])) for name, now in resources().items()}
            elapsed_s = time.perf_counter() - start_time
            if not any(left.values()) or elapsed_s > RECLAIM_TIMEOUT_S:
                break
            time.sleep(POLL_INTERVAL_S)
        reclaimed_s = None if any(left.values()) else elapsed_s
        return {"opened and used s": opened_s, "reclaimed s": reclaimed_s, **left}


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
