"""Measures the sandbox without a server: `python -m benchmarks.sandbox.engine KIND LEVEL PRELOAD N`.

Prints a JSON list of values, or a JSON string with the reason if the level is not available on this machine.
"""

import asyncio
import json
import sys
import time
from typing import Final

from benchmarks.processes import memory_mb, run
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


async def start(sandbox: Sandbox, count: int) -> list[float]:
    """Start sessions one after another; returns the ms of each."""
    durations = []
    for _ in range(3):
        await (await sandbox.open()).close()
    for _ in range(count):
        start_time = time.perf_counter()
        session = await sandbox.open()
        durations.append((time.perf_counter() - start_time) * 1e3)
        await session.close()
    return durations


async def burst(sandbox: Sandbox, count: int) -> list[float]:
    """Start sessions and execute in each, all at once; returns the ms from the common start to each result."""
    await (await sandbox.open()).close()
    start_time = time.perf_counter()

    async def start_and_run() -> float:
        session = await sandbox.open()
        done = await session.execute(CODE)
        assert done.result == "2", done
        return (time.perf_counter() - start_time) * 1e3

    return await asyncio.gather(*(start_and_run() for _ in range(count)))


async def execute(sandbox: Sandbox, count: int) -> list[float]:
    """Execute in one session; returns the ms of each execution."""
    session, durations = await sandbox.open(), []
    for _ in range(WARM_UP + count):
        start_time = time.perf_counter()
        done = await session.execute(CODE)
        durations.append((time.perf_counter() - start_time) * 1e3)
        assert done.result == "2", done
    return durations[WARM_UP:]


async def memory(sandbox: Sandbox, count: int) -> list[float]:
    """Open `count` sessions at once; returns the MB of each, the zygote's included."""
    sessions = [await sandbox.open() for _ in range(count)]
    for session in sessions:
        done = await session.execute(USE)
        assert done.status == "ok", done
    assert sandbox.zygote_pid is not None
    return [memory_mb([sandbox.zygote_pid]) / count]


async def loops(sandbox: Sandbox, milliseconds: int) -> list[float]:
    """Run the loop in a session and in a plain interpreter alternately; returns the ratio of their fastest turns."""
    code = LOOP.replace("SECONDS", str(milliseconds / 1e3))
    session = await sandbox.open()
    inside, plain = [], []
    for _ in range(5):
        inside.append(float((await session.execute(f"{code}\nper_turn")).result or "nan"))
        outside = [sys.executable, "-c", f"{code}\nprint(per_turn)"]
        plain.append(float(await asyncio.to_thread(run, outside)))
    return [min(inside) / min(plain)]


MEASURES: Final = {measure.__name__: measure for measure in (start, burst, execute, memory, loops)}


async def measure(kind: str, level: Isolation, preload: str, count: int) -> list[float] | str:
    """Start a sandbox at one level, and run one of MEASURES."""
    modules = () if preload == "none" else (preload,)
    try:
        async with Sandbox(SandboxConfig(preload=modules, strongest=level, minimum=level)) as sandbox:
            return await MEASURES[kind](sandbox, count)
    except SandboxUnavailableError as error:
        return str(error)


if __name__ == "__main__":
    kind, level, preload, count = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(kind, Isolation(level), preload, int(count)))))
