"""Measurements of cold starts and of the pool."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.containers.contestants import options_of, start_ours, start_plain
from benchmarks.containers.servers import Subject
from benchmarks.wire.measurements import Measurements
from openenv_core.providers.pool import DockerPool

LEASE_TIMEOUT_S: Final = 120.0

Progress = Callable[[str], None]


def measure_cold_starts(
    subject: Subject, rounds: int, measurements: Measurements, progress: Progress
) -> None:
    """Start the image both ways, one after the other; the order alternates between rounds."""
    for start in (start_plain, start_ours):
        start(subject)  # the first start fills caches, and ours starts its companion
    for round_ in range(rounds):
        progress(f"cold start of {subject.image}: round {round_ + 1} of {rounds}")
        ways = [("docker run", start_plain), ("ours", start_ours)]
        for runner, start in ways if round_ % 2 == 0 else reversed(ways):
            measurements.add("cold s", runner, subject.name, start(subject))


def measure_pool(
    subject: Subject, leases: int, size: int, measurements: Measurements, progress: Progress
) -> None:
    """Lease containers from a pool one after another: while it is full, and while it starts others."""
    with DockerPool(subject.image, size, options=options_of(subject)) as pool:
        for metric, ready in (("hand-out", size), ("while others start", 1)):
            durations_ms: list[float] = []
            for lease in range(leases):
                progress(f"pool of {subject.image}, {metric}: {lease + 1} of {leases}")
                pool.wait(ready, LEASE_TIMEOUT_S)
                begin = time.perf_counter()
                container = pool.lease(LEASE_TIMEOUT_S)
                durations_ms.append((time.perf_counter() - begin) * 1e3)
                container.close()
            for percent in (50, 95):
                measurements.add(
                    f"{metric} p{percent} ms", "ours", subject.name, percentile(durations_ms, percent)
                )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
