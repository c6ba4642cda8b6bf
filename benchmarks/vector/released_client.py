"""Many sessions through the released client, one socket each. Runs in the installation that has it.

    python released_client.py PORT SESSIONS SECONDS

Prints steps a second.
"""

import asyncio
import sys
import time

from openenv.core import GenericEnvClient


async def main(port: int, sessions: int, seconds: float) -> float:
    """Step all sessions at once, as often as there is time."""
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
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + length:
            await asyncio.gather(*map(step, clients))
            count += 1
        rate = count * sessions / (time.perf_counter() - began)
    await asyncio.gather(*(client.close() for client in clients))
    return rate


if __name__ == "__main__":
    print(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
