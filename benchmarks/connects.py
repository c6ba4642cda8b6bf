"""The time of a connect to one of several servers, compared with a connect to a given one.

`fleet` connects one client after another; `fleet, first` has forgotten what it knew of the servers' loads, as a program
at its first connect, or a second after the last one. In alternating rounds, with servers of BlackJack in processes of
this machine. CPU time is the client's and the servers' together:
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
from benchmarks.processes import Server, serve_command, serving
from openenv_core import GenericEnvClient
from openenv_core.client.servers import forget_loads

SERVERS: Final = 4
EXTRA_MS: Final = 2.0
"""The bar: how much longer the choice may take."""

CONNECT: Final = "connect, ms"
CPU: Final = "CPU of a connect, ms"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(300, quick=5, option="rounds (300)")


def measure(plan: Plan, measurements: Measurements) -> None:
    """Connect both ways, in alternating rounds."""
    with ExitStack() as stack:
        command = serve_command("envs.blackjack_env.server.app:app")
        servers = [stack.enter_context(serving(command, {})) for _ in range(SERVERS)]
        asyncio.run(_connects(measurements, servers, plan))


async def _connects(measurements: Measurements, servers: list[Server], plan: Plan) -> None:
    urls = [server.url for server in servers]
    for fleet in ("fleet", "fleet, first"):
        for number, subject in in_rounds(plan.rounds, (fleet, "direct")):
            if subject == "fleet, first":
                forget_loads()
            client = GenericEnvClient(urls[number % SERVERS] if subject == "direct" else urls)
            cpu, began = _cpu_ns(servers), time.perf_counter()
            await client.connect()
            measurements.add(CONNECT, subject, "", 1e3 * (time.perf_counter() - began))
            measurements.add(CPU, subject, "", 1e-6 * (_cpu_ns(servers) - cpu))
            await client.close()


def _cpu_ns(servers: list[Server]) -> int:
    return time.process_time_ns() + sum(server.cpu_ns() for server in servers)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield the bars of the differences."""
    for figure in (CONNECT, CPU):
        direct = measurements.median(figure, "direct")
        for subject in ("fleet", "fleet, first"):
            fleet = measurements.median(figure, subject)
            if fleet is not None and direct is not None:
                yield from at_most(f"{figure}: {subject} - direct", fleet - direct, EXTRA_MS)


BENCHMARK = Benchmark(
    about=__doc__, plan=Plan, sections=(measure,), tables={"Connects": (CONNECT, CPU)}, bars=bars
)

if __name__ == "__main__":
    main("connects")
