"""What is measured, each into the figures of the run."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.containers.contestants import options_of, our_start, plain_start
from benchmarks.containers.servers import Subject
from benchmarks.wire.figures import Figures
from openenv_core.providers.pool import DockerPool

PATIENCE_S: Final = 120.0

Progress = Callable[[str], None]


def cold(subject: Subject, rounds: int, figures: Figures, progress: Progress) -> None:
    """Start the image both ways, one after the other, with the order changed from round to round."""
    for start in (plain_start, our_start):
        start(subject)  # the first one pays for cold caches, and ours for its companion
    for round_ in range(rounds):
        progress(f"cold start of {subject.image}: round {round_ + 1} of {rounds}")
        ways = [("docker run", plain_start), ("ours", our_start)]
        for who, start in ways if round_ % 2 == 0 else reversed(ways):
            figures.add("cold s", who, subject.name, start(subject))


def pool(subject: Subject, leases: int, size: int, figures: Figures, progress: Progress) -> None:
    """Take containers out of a pool one after another, each while at least one is ready."""
    took: list[float] = []
    with DockerPool(subject.image, size, options=options_of(subject)) as warm:
        progress(f"pool of {subject.image}: filling")
        warm.wait(timeout_s=PATIENCE_S)
        for lease in range(leases):
            progress(f"pool of {subject.image}: {lease + 1} of {leases}")
            warm.wait(1, PATIENCE_S)
            begin = time.perf_counter()
            leased = warm.lease(PATIENCE_S)
            took.append((time.perf_counter() - begin) * 1e3)
            leased.close()
    figures.add("hand-out p50 ms", "ours", subject.name, percentile(took, 50))
    figures.add("hand-out p95 ms", "ours", subject.name, percentile(took, 95))
    figures.add("hand-out max ms", "ours", subject.name, max(took))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
