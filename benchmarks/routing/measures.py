"""Sends the same jobs through both kinds of routing, and compares a routed call with a bare one."""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.wire.measurements import Measurements

if TYPE_CHECKING:
    from rl_bridge.services.service import Service

LEAST_LOADED: Final = "least loaded"
ROUND_ROBIN: Final = "round robin"
STRATEGIES: Final = (ROUND_ROBIN, LEAST_LOADED)
EVEN: Final = "all alike"
UNEVEN: Final = "one slowed three times"
LOADS: Final = {EVEN: 1.0, UNEVEN: 3.0}
MAKESPAN, P99, MEAN = "makespan s", "p99 s", "mean s"

ROUTED: Final = "route"
BARE: Final = "bare call"
CALL: Final = "p50 µs a call"

Send = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        seeds: Number of lists of jobs; each list is sent with both kinds of routing, under both loads.
        jobs: Jobs in a list.
        callers: Concurrent callers; each sends its next job when its last is done.
        replicas: Replicas; each works on one job at a time.
        job_s: Median duration of a job in seconds.
        sigma: Standard deviation of the logarithm of the durations, which are log-normal: at 1.5 one job in a hundred
            is 33 times as long as the median.
        calls: Consecutive empty calls in a round.
        rounds: Rounds of empty calls, routed and bare in turn.
    """

    seeds: int = 10
    jobs: int = 300
    callers: int = 12
    replicas: int = 4
    job_s: float = 0.01
    sigma: float = 1.5
    calls: int = 500
    rounds: int = 5

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return replace(self, seeds=1, jobs=24, callers=6, replicas=2, calls=20, rounds=1)


def measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    """Run a plan, and add its measurements.

    Raises:
        rl_bridge.errors.BridgeError: The services did not work, or Monarch is not installed.
    """
    asyncio.run(_measure(plan, measurements, progress))


async def _measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    from benchmarks.routing.roles import Worker
    from rl_bridge.services.fleet import Fleet

    with tempfile.TemporaryDirectory() as logs:
        async with Fleet(Path(logs)) as fleet:
            workers = await Worker.options(num_replicas=plan.replicas).as_service()
            await fleet.guard(_jobs(plan, workers, measurements, progress))
            progress("empty calls")
            await fleet.guard(_calls(plan, workers, measurements))


async def _jobs(
    plan: Plan, workers: "Service", measurements: Measurements, progress: Callable[[str], None]
) -> None:
    slowed = workers.replicas[0].pids[0]
    for seed in range(plan.seeds):
        lengths = [
            plan.job_s * random.Random(f"{seed} {job}").lognormvariate(0.0, plan.sigma)
            for job in range(plan.jobs)
        ]
        for load, slowness in LOADS.items():
            await workers.slow_down.fanout(slowed, slowness)
            for strategy in STRATEGIES:
                progress(f"seed {seed + 1} of {plan.seeds}: {strategy}, {load}")
                send = workers.work.route if strategy == LEAST_LOADED else _in_turns(workers)
                makespan, durations = await _assign_to_passes(lengths, plan.callers, send)
                measurements.add(MAKESPAN, strategy, load, makespan)
                measurements.add(P99, strategy, load, statistics.quantiles(durations, n=100)[98])
                measurements.add(MEAN, strategy, load, statistics.fmean(durations))


def _in_turns(workers: "Service") -> Send:
    turns = cycle(workers.roster.targets)

    async def send(seconds: float) -> None:
        await next(turns).call("work", (seconds,), {})

    return send


async def _assign_to_passes(lengths: list[float], callers: int, send: Send) -> tuple[float, list[float]]:
    """Send all jobs; returns the total seconds and the seconds of each job."""
    waiting = iter(lengths)
    durations: list[float] = []

    async def call() -> None:
        for length in waiting:
            begin = time.perf_counter()
            await send(length)
            durations.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    return time.perf_counter() - begin, durations


async def _calls(plan: Plan, workers: "Service", measurements: Measurements) -> None:
    bare = workers.roster.targets[0].ranks[0].nothing.choose  # type: ignore[attr-defined]
    ways: dict[str, Callable[[], Awaitable[None]]] = {ROUTED: workers.nothing.route, BARE: bare}
    for _ in range(plan.rounds):
        for name, call in ways.items():
            durations = []
            for _ in range(plan.calls):
                begin = time.perf_counter()
                await call()
                durations.append(time.perf_counter() - begin)
            measurements.add(CALL, name, "", statistics.median(durations) * 1e6)
