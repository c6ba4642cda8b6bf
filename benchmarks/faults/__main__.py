"""Fault tolerance of a training run of the BlackJack example, whose processes get SIGKILL.

It has two generators, two rollout workers, a reward pool and an environment server. The times are drawn from a seed,
each kill once the previous process has recovered. Prints when each loss was noticed and when the replica served again;
the run must end by itself with every group trained, none twice, and no process left:
  python -m benchmarks.faults                          20 kills, about fifteen minutes on two cores
  python -m benchmarks.faults --kills 4 --iterations 40
"""

import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.faults.job import Job
from benchmarks.faults.kills import KINDS, Killer
from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_least,
    at_most,
    main,
    progress,
    ratio,
    setting,
)
from benchmarks.processes import ROOT

RUN: Final = "the run"
REWARD: Final = "reward.function=benchmarks.faults.rewards.compute_reward"
GROUPS_AN_ITERATION: Final = 64
END_TIMEOUT_S: Final = 1800.0
NOTICED_S: Final = 10.0
FIGURES: Final = ("killed", "trained groups", "trained twice", "processes left", "exit status")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run, and how often its processes are killed."""

    kills: int = setting(20, quick=4, option="processes to kill (20)")
    iterations: int = setting(600, quick=40, option="of the run (600)")
    seed: int = setting(1, option="seed of times and victims (1)", read=int)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Run and kill.

    Raises:
        BenchmarkError: The run did not end in time, or no replica of a service serves.
    """
    with tempfile.TemporaryDirectory(prefix="ropewalk-faults-") as scratch:
        settings = (f"trainer.iterations={plan.iterations}", "rollout.max_staleness=1", REWARD)
        job = Job(ROOT, Path(scratch) / "run", *settings)
        try:
            killer = Killer(job, plan.seed)
            killer.all(list(itertools.islice(itertools.cycle(KINDS), plan.kills)))
            progress("waiting for the run to end")
            if (status := job.wait(END_TIMEOUT_S)) != 0:
                print(job.output()[-3000:], file=sys.stderr)
            if status is None:
                raise BenchmarkError(f"expected the run to end within {END_TIMEOUT_S:g} s, it has not")
            record(killer, plan.kills, plan.iterations * GROUPS_AN_ITERATION, measurements)
        finally:
            job.close()


def record(killer: Killer, wanted: int, groups: int, measurements: Measurements, *, status: int = 0) -> None:
    """Add what happened.

    Args:
        killer: The killer, after its kills and the end of the run.
        wanted: Number of kills requested.
        groups: Number of groups that the run should train.
        measurements: The values are added here.
        status: Expected exit status of the run.
    """
    for kill in killer.kills:
        replica = f"replica {kill.replica} at version {kill.version}"
        for figure, seconds in (("noticed s", kill.noticed_s), ("serving again s", kill.serving_s)):
            measurements.add(figure, kill.kind, replica, float("inf") if seconds is None else seconds)
    trained, left = killer.job.trained(), len(killer.job.find_leftovers())
    counts = (len(killer.kills), len(trained), len(trained) - len(set(trained)), left)
    values = (*counts, killer.job.process.returncode)
    measurements.add_all(RUN, "", dict(zip(FIGURES, values, strict=True)))
    measurements.add_all("expected", "", dict(zip(FIGURES, (wanted, groups, 0, 0, status), strict=True)))
    measurements.add("cold start of a generator s", RUN, "", killer.cold_start_s)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for figure, bar in zip(FIGURES, (at_least, at_least, at_most, at_most, at_most), strict=True):
        yield from bar(figure, measurements.median(figure, RUN), measurements.median(figure, "expected") or 0)
    cold_s = measurements.median("cold start of a generator s", RUN)
    for kind in KINDS:
        loads = [load for subject, load in measurements.measured("noticed s") if subject == kind]
        noticed, serving = (
            max((measurements.most(figure, kind, load) or 0.0 for load in loads), default=None)
            for figure in ("noticed s", "serving again s")
        )
        yield from at_most(f"{kind}: slowest loss noticed and given to others, s", noticed, NOTICED_S)
        if kind == "policy":
            label = "policy: slowest to serve again, over the cold start"
            yield from at_most(label, ratio(serving, cold_s), 2.0)
        elif kind != "rollout":  # these have one replica: work waits for its restart
            yield from at_most(f"{kind}: slowest to serve again, s", serving, NOTICED_S)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(measure,),
    tables={"Kills": ("noticed s", "serving again s"), "The run": (*FIGURES, "cold start of a generator s")},
    bars=bars,
    errors=(BenchmarkError,),
)

if __name__ == "__main__":
    main("faults")
