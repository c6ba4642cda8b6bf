"""The time of a connect to one of several servers, compared with a connect to the one that it chose.

In alternating rounds, with servers of BlackJack in processes of this machine:
  python -m benchmarks.connects             seconds
  python -m benchmarks.connects --quick     does it run?
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.harness import Bar, Benchmark, Measurements, at_most, in_rounds, main, setting
from benchmarks.processes import serve_command, serving
from openenv_core import GenericEnvClient

SERVERS: Final = 4
EXTRA_MS: Final = 2.0
"""The bar: how much longer the choice may take."""

CONNECT: Final = "connect, ms"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(300, quick=5, option="rounds (300)")


def measure(plan: Plan, measurements: Measurements) -> None:
    """Connect both ways, in alternating rounds."""
    with ExitStack() as stack:
        command = serve_command("envs.blackjack_env.server.app:app")
        urls = [stack.enter_context(serving(command, {})).url for _ in range(SERVERS)]
        asyncio.run(_connects(measurements, urls, plan))


async def _connects(measurements: Measurements, urls: list[str], plan: Plan) -> None:
    for number, subject in in_rounds(plan.rounds, ("fleet", "direct")):
        client = GenericEnvClient(urls if subject == "fleet" else urls[number % SERVERS])
        began = time.perf_counter()
        await client.connect()
        measurements.add(CONNECT, subject, "", 1e3 * (time.perf_counter() - began))
        await client.close()


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield the bar of the difference."""
    fleet, direct = (measurements.median(CONNECT, subject) for subject in ("fleet", "direct"))
    if fleet is not None and direct is not None:
        yield from at_most("connect: fleet - direct, ms", fleet - direct, EXTRA_MS)


BENCHMARK = Benchmark(
    about=__doc__, plan=Plan, sections=(measure,), tables={"Connects": (CONNECT,)}, bars=bars
)

if __name__ == "__main__":
    main("connects")
