"""Measures the code interpreter through its server, with our client."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.sandbox.engine import CODE, WARM_UP
from benchmarks.sandbox.processes import cpu_s
from benchmarks.wire.processes import Server, free_port, serving
from envs.code_interpreter_env import CodeInterpreterEnv

APP: Final = "envs.code_interpreter_env.server.app:app"


@contextmanager
def server(
    level: str, preload: str = "none", max_sessions: int | None = None
) -> Iterator[tuple[Server, str]]:
    """Run a server at one level; yields it and its temporary folder.

    Raises:
        StartError: The server did not start.
    """
    port = free_port()
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
        command = [sys.executable, "-m", "openenv_core.cli", "serve", APP, "--port", str(port)]
        with serving(Server([*command, "--log-level", "warning"], port, env, None)) as running:
            yield running, temporary


async def executions(running: Server, count: int) -> tuple[list[float], float]:
    """Execute in one session; returns the ms of each execution, and the CPU µs of server and interpreter for one."""
    async with CodeInterpreterEnv(base_url=f"http://127.0.0.1:{running.port}") as env:
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
    environments = [CodeInterpreterEnv(base_url=f"http://127.0.0.1:{running.port}") for _ in range(sessions)]
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
