"""Steps many sessions through the released client, one socket each. Runs in the installation that has it.

    python released_client.py PORT SESSIONS SECONDS

Prints steps/s, and the CPU µs per step of this process.
"""

import asyncio
import sys
import time

from openenv.core import GenericEnvClient


async def main(port: int, sessions: int, seconds: float) -> tuple[float, float]:
    """Step all sessions at once, repeatedly for `seconds`; returns what is printed."""
    clients = [GenericEnvClient(base_url=f"http://127.0.0.1:{port}") for _ in range(sessions)]
    for client in clients:
        await client.connect()
    await asyncio.gather(*(client.reset() for client in clients))
    count = 0

    async def step(client: GenericEnvClient) -> None:
        result = await client.step({"action": count & 1})
        if result.done:
            await client.reset()

    for length in (seconds / 4, seconds):
        count, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < began + length:
            await asyncio.gather(*map(step, clients))
            count += 1
        steps, took, cpu = count * sessions, time.perf_counter() - began, time.process_time() - cpu
    await asyncio.gather(*(client.close() for client in clients))
    return steps / took, 1e6 * cpu / steps


if __name__ == "__main__":
    print(*asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
