"""Measures the sandbox without a server: `python -m benchmarks.sandbox.engine KIND LEVEL PRELOAD N`.

Prints one JSON object; {"refused": why} if the level is not available on this machine.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any, Final

from benchmarks.processes import cpu_s, memory_mb, run
from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailableError

WARM_UP: Final = 20

CODE: Final = "1 + 1"
"""The code of every timed execution."""

USE: Final = "import math\nnumbers = [math.sqrt(n) for n in range(1000)]\nsum(numbers)"
"""The code that is executed once in every session whose memory is measured."""

LOOP: Final = """
import time

class Point:
    def __init__(self, x):
        self.x = x

    def moved(self, by):
        return Point(self.x + by)

def work(until):
    turns, point, seen = 0, Point(0), {}
    while time.process_time() < until:
        for n in range(2000):
            point = point.moved(n & 3)
            seen[n] = point.x % 7
        turns += 1
    return turns

began = time.process_time()
turns = work(began + SECONDS)
per_turn = (time.process_time() - began) / turns
"""
"""A loop over calls, attributes, numbers and a dictionary, for SECONDS of CPU time; `per_turn` is the time per turn."""


async def start(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Start sessions one after another; returns the ms of each, and the CPU ms to start and close one."""
    durations = []
    for _ in range(3):
        await (await sandbox.open()).close()
    before = _cpu(sandbox)
    for _ in range(count):
        start_time = time.perf_counter()
        session = await sandbox.open()
        durations.append((time.perf_counter() - start_time) * 1e3)
        await session.close()
    return {"ms": durations, "cpu": (_cpu(sandbox) - before) * 1e3 / count}


async def burst(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Start sessions and execute in each, all at once; returns the ms from the common start to each result."""
    await (await sandbox.open()).close()
    before, start_time, sessions = _cpu(sandbox), time.perf_counter(), []

    async def start_and_run() -> float:
        sessions.append(session := await sandbox.open())
        done = await session.execute(CODE)
        assert done.result == "2", done
        return (time.perf_counter() - start_time) * 1e3

    durations = await asyncio.gather(*(start_and_run() for _ in range(count)))
    cpu = _cpu(sandbox) - before
    await asyncio.gather(*(session.close() for session in sessions))
    return {"ms": durations, "cpu": cpu * 1e3 / count}


async def execute(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Execute in one session; returns the ms of each execution, and the CPU µs of one."""
    session = await sandbox.open()
    for _ in range(WARM_UP):
        await session.execute(CODE)
    before, durations = _cpu(sandbox), []
    for _ in range(count):
        start_time = time.perf_counter()
        done = await session.execute(CODE)
        durations.append((time.perf_counter() - start_time) * 1e3)
        assert done.result == "2", done
    return {"ms": durations, "cpu": (_cpu(sandbox) - before) * 1e6 / count}


async def memory(sandbox: Sandbox, count: int) -> dict[str, Any]:
    """Open `count` sessions at once; returns their MB per session, and the kB per session that this process grew by."""
    await (await sandbox.open()).close()
    own = memory_mb([os.getpid()]) - memory_mb(_roots(sandbox))
    sessions = []
    for _ in range(count):
        session = await sandbox.open()
        done = await session.execute(USE)
        assert done.status == "ok", done
        sessions.append(session)
    whole, inside = memory_mb([os.getpid()]), memory_mb(_roots(sandbox))
    return {"mb": inside / count, "server_kb": (whole - inside - own) * 1024 / count}


async def loops(sandbox: Sandbox, milliseconds: int) -> dict[str, Any]:
    """Run the loop in a session and in a plain interpreter alternately; returns each one's minimum CPU µs of a turn."""
    code = LOOP.replace("SECONDS", str(milliseconds / 1e3))
    session = await sandbox.open()
    inside, plain = [], []
    for _ in range(5):
        inside.append(float((await session.execute(f"{code}\nper_turn")).result or "nan"))
        outside = [sys.executable, "-c", f"{code}\nprint(per_turn)"]
        plain.append(float(await asyncio.to_thread(run, outside)))
    return {"inside_us": min(inside) * 1e6, "plain_us": min(plain) * 1e6}


def _roots(sandbox: Sandbox) -> list[int]:
    return [] if sandbox.zygote_pid is None else [sandbox.zygote_pid]


def _cpu(sandbox: Sandbox) -> float:
    return time.process_time() + cpu_s(_roots(sandbox))


MEASURES: Final = {measure.__name__: measure for measure in (start, burst, execute, memory, loops)}


async def measure(kind: str, level: Isolation, preload: tuple[str, ...], count: int) -> dict[str, Any]:
    """Start a sandbox at one level, and run one of MEASURES."""
    config = SandboxConfig(preload=preload, strongest=level, minimum=level)
    try:
        async with Sandbox(config) as sandbox:
            return await MEASURES[kind](sandbox, count)
    except SandboxUnavailableError as error:
        return {"refused": str(error)}


def main() -> None:
    """Measure what the command line asks for."""
    kind, level, preload, count = sys.argv[1:]
    modules = () if preload == "none" else tuple(preload.split("+"))
    print(json.dumps(asyncio.run(measure(kind, Isolation(level), modules, int(count)))))


if __name__ == "__main__":
    main()
