"""Steps through a client and measures the cost to its process.

    python client_load.py {ours,ours-typed,released} PORT SOCKETS SECONDS WARM_UP_S [--sync]

Prints the CPU µs per step. Imports nothing of this package, so that the
installation of the released client can run it by its path.
"""

import asyncio
import sys
import time
from typing import Any

MESSAGE = "hello from the driver"


def make(kind: str, url: str) -> Any:
    """Return an unconnected client of one kind, and its action."""
    if kind == "released":
        from openenv.core import GenericEnvClient as ReleasedClient

        return ReleasedClient(base_url=url), {"message": MESSAGE}
    if kind == "ours":
        from openenv_core import GenericEnvClient

        return GenericEnvClient(base_url=url), {"message": MESSAGE}
    from openenv_core import Action, EnvClient, Observation, State

    class Message(Action):
        message: str

    class Echo(Observation):
        echoed: str
        step: int

    class TypedClient(EnvClient[Message, Echo, State]):
        action_type = Message
        observation_type = Echo

    return TypedClient(base_url=url), Message(message=MESSAGE)


async def measure(kind: str, url: str, sockets: int, seconds: float, warm_up_s: float) -> float:
    """Step through `sockets` clients at once; returns the CPU µs per step."""
    clients = [make(kind, url) for _ in range(sockets)]
    for client, _ in clients:
        await client.connect()
        await client.reset()
    end = 0.0

    async def work(client: Any, action: Any) -> int:
        count = 0
        while time.perf_counter() < end:
            await client.step(action)
            count += 1
        return count

    async def spell(length: float) -> int:
        nonlocal end
        end = time.perf_counter() + length
        return sum(await asyncio.gather(*(work(*pair) for pair in clients)))

    await spell(warm_up_s)
    cpu_s = time.process_time()
    steps = await spell(seconds)
    cpu_us = 1e6 * (time.process_time() - cpu_s) / steps
    for client, _ in clients:
        await client.close()
    return cpu_us


def measure_sync(kind: str, url: str, seconds: float, warm_up_s: float) -> float:
    """Step through one synchronous client; returns the CPU µs per step."""
    client, action = make(kind, url)
    with client.sync() as env:
        env.reset()
        for length in (warm_up_s, seconds):
            steps, cpu_s, began = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() < began + length:
                env.step(action)
                steps += 1
        return 1e6 * (time.process_time() - cpu_s) / steps


def main() -> None:
    """Measure what the command line asks for."""
    kind, port, sockets, *times = sys.argv[1:6]
    url = f"http://127.0.0.1:{port}"
    seconds, warm_up_s = map(float, times)
    if "--sync" in sys.argv:
        print(measure_sync(kind, url, seconds, warm_up_s))
    else:
        print(asyncio.run(measure(kind, url, int(sockets), seconds, warm_up_s)))


if __name__ == "__main__":
    main()
