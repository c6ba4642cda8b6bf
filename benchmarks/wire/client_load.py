"""Steps through a client and measures the cost to its process.

    python client_load.py {ours,released} PORT SOCKETS SECONDS WARM_UP_S [--sync]

Prints the CPU µs per step. Imports nothing of this package, so that the
installation of the released client can run it by its path.
"""

import asyncio
import sys
import time
from importlib import import_module
from typing import Any

ACTION = {"message": "hello from the driver"}


def make(kind: str, url: str) -> Any:
    """Return an unconnected client of one kind."""
    package = import_module("openenv.core" if kind == "released" else "openenv_core")
    return package.GenericEnvClient(base_url=url)


async def measure(kind: str, url: str, sockets: int, seconds: float, warm_up_s: float) -> float:
    """Step through `sockets` clients at once; returns the CPU µs per step."""
    clients = [make(kind, url) for _ in range(sockets)]
    for client in clients:
        await client.connect()
        await client.reset()
    end = 0.0

    async def work(client: Any) -> int:
        count = 0
        while time.perf_counter() < end:
            await client.step(ACTION)
            count += 1
        return count

    async def spell(length: float) -> int:
        nonlocal end
        end = time.perf_counter() + length
        return sum(await asyncio.gather(*map(work, clients)))

    await spell(warm_up_s)
    cpu_s = time.process_time()
    steps = await spell(seconds)
    cpu_us = 1e6 * (time.process_time() - cpu_s) / steps
    for client in clients:
        await client.close()
    return cpu_us


def measure_sync(kind: str, url: str, seconds: float, warm_up_s: float) -> float:
    """Step through one synchronous client; returns the CPU µs per step."""
    with make(kind, url).sync() as env:
        env.reset()
        for length in (warm_up_s, seconds):
            steps, cpu_s, began = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() < began + length:
                env.step(ACTION)
                steps += 1
        return 1e6 * (time.process_time() - cpu_s) / steps


if __name__ == "__main__":
    kind, port, sockets, *times = sys.argv[1:6]
    url = f"http://127.0.0.1:{port}"
    if "--sync" in sys.argv:
        print(measure_sync(kind, url, *map(float, times)))
    else:
        print(asyncio.run(measure(kind, url, int(sockets), *map(float, times))))
