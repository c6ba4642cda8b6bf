"""Runs one synthetic job for each bound on staleness, in alternating rounds."""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from benchmarks.wire.measurements import Measurements
from rl_bridge.synthetic.job import SyntheticSettings

if TYPE_CHECKING:
    from rl_bridge.synthetic.actor import SyntheticRun

SYNCHRONOUS: Final = 0
BOUNDS: Final = (SYNCHRONOUS, 1, 4)
ROLES: Final = ("controller", "rollout", "trainer")

GROUPS: Final = "groups/s"
ROLL, TRAIN, SYNC = "roll s", "train s", "sync s"
STALEST: Final = "most stale"
UNACCOUNTED: Final = "unaccounted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Jobs of each bound.
        job: Settings common to all jobs: batch, sessions, sleeps, the trainer's time.
        bounds: `max_staleness` of each job.
    """

    rounds: int = 3
    job: SyntheticSettings = field(default_factory=lambda: SyntheticSettings(iterations=30, train_s=0.9))
    bounds: tuple[int, ...] = BOUNDS

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        tiny = replace(self.job, iterations=3, groups_per_batch=2, group_size=2, episode_s=0.02, train_s=0.02)
        return replace(self, rounds=1, job=tiny)


def job_name(bound: int) -> str:
    """Return the name of a job in tables."""
    return "synchronous" if bound == SYNCHRONOUS else f"max_staleness {bound}"


def measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    """Run every job of a plan, and add its measurements.

    Raises:
        rl_bridge.errors.BridgeError: A job failed, or Monarch is not installed.
    """
    from rl_bridge.synthetic.actor import run_synthetic

    for number in range(1, plan.rounds + 1):
        for bound in plan.bounds:
            progress(f"round {number} of {plan.rounds}: {job_name(bound)}")
            # The jobs of a round share its sleeps; another round draws others.
            job = replace(plan.job, max_staleness=bound, seed=number)
            _add(measurements, job_name(bound), asyncio.run(run_synthetic(job)))


def _add(measurements: Measurements, name: str, run: "SyntheticRun") -> None:
    # The first step counts too, although nothing was prefetched for it.
    measurements.add(GROUPS, name, "", (run.throughput.groups or 0) / run.throughput.seconds)
    measurements.add(ROLL, name, "", statistics.mean(step.roll_s for step in run.steps))
    measurements.add(TRAIN, name, "", statistics.mean(step.train_s for step in run.steps))
    measurements.add(SYNC, name, "", statistics.mean(step.sync_s for step in run.steps))
    measurements.add(STALEST, name, "", max(step.staleness for step in run.steps))
    for role in ROLES:
        totals = run.throughput.roles[role]
        measurements.add(UNACCOUNTED, name, role, totals.unaccounted_s / totals.wall_s)
        measurements.add("busy", name, role, run.throughput.utilisation(role) or 0.0)
