"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator

from benchmarks.recipes.measures import (
    GROUPS,
    IMITATED,
    IMITATED_TO_THE_END,
    REINFORCED,
    SECONDS,
    SEED,
    SETTLED,
    SOLVED,
    STEPS,
    TASKS,
    TAUGHT,
    WITHOUT_GRADIENT,
)
from benchmarks.recipes.plan import RECIPES, SAMPLINGS
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts
from openenv_core.evaluation.statistics import wilson_interval

GAIN = 0.10
"""Minimum gain of reinforcement learning with each seed, in share of tasks solved."""
ENOUGH_TASKS = 500
FALL_WITHOUT_GRADIENT = 1 / 3
"""Minimum relative decrease of the share of groups without gradient, with each seed."""
ENDS = "The iteration or update in progress at the time limit is finished, so seconds may slightly exceed the limit."


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for name in RECIPES:
        for settled in measurements.values.get((SETTLED, TAUGHT, name), []):
            yield Bar(f"{name}: validation loss stopped falling", settled, 1.0, "at least")
        for seed, fall in _falls(measurements, name):
            yield Bar(
                f"{name}, seed {seed:.0f}: fewer groups without gradient",
                fall,
                FALL_WITHOUT_GRADIENT,
                "at least",
            )
        before, after = _runs(measurements, TAUGHT, name), _runs(measurements, REINFORCED, name)
        if not before or not after:
            continue
        ((_, taught, tasks, _, _),) = before
        yield Bar(f"{name}: held-out tasks", min(tasks, *(row[2] for row in after)), ENOUGH_TASKS, "at least")
        for seed, solved, number, _, _ in after:
            prefix = f"{name}, seed {seed:.0f}"
            yield Bar(
                f"{prefix}: more solved", _share(solved, number) - _share(taught, tasks), GAIN, "at least"
            )
            apart = _interval(solved, number)[0] - _interval(taught, tasks)[1]
            yield Bar(f"{prefix}: between the intervals", apart, 0.0, "at least")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    rows = []
    for name in RECIPES:
        for policy in (TAUGHT, REINFORCED, IMITATED, IMITATED_TO_THE_END, *SAMPLINGS):
            for seed, solved, tasks, steps, seconds in _runs(measurements, policy, name):
                low, high = _interval(solved, tasks)
                rows.append(
                    (
                        name,
                        policy,
                        "" if policy == TAUGHT else f"{seed:.0f}",
                        f"{_share(solved, tasks):.1%}",
                        f"{low:.1%} to {high:.1%}",
                        f"{tasks:.0f}",
                        f"{steps:.0f}",
                        f"{seconds:.0f}",
                        _ending(measurements, name) if policy == TAUGHT else "",
                    )
                )
    heading = (
        "recipe", "policy", "seed", SOLVED, "95% interval", TASKS, "iterations or updates", SECONDS, "validation loss",
    )  # fmt: skip
    parts = ["### Held-out tasks\n\n" + table(heading, rows), ENDS]
    if drawn := [row for name in RECIPES for row in _drawn(measurements, name)]:
        parts.append(
            "### Sampling of tasks\n\n" + table(("recipe", "tasks", "seed", GROUPS, WITHOUT_GRADIENT), drawn)
        )
    return "\n\n".join([*parts, *verdicts(measurements, bars(measurements), ".3g")])


def _without_gradient_shares(
    measurements: Measurements, name: str, sampling: str
) -> list[tuple[float, float, float]]:
    """Return seed, groups and the share of groups without gradient of each run."""
    columns = (
        measurements.values.get((metric, sampling, name), []) for metric in (SEED, GROUPS, WITHOUT_GRADIENT)
    )
    return [
        (seed, groups, without_gradient / groups)
        for seed, groups, without_gradient in zip(*columns, strict=True)
    ]


def _drawn(measurements: Measurements, name: str) -> Iterator[tuple[str, ...]]:
    for sampling in SAMPLINGS:
        for seed, groups, share in _without_gradient_shares(measurements, name, sampling):
            yield name, sampling, f"{seed:.0f}", f"{groups:.0f}", f"{share:.1%}"


def _falls(measurements: Measurements, name: str) -> Iterator[tuple[float, float]]:
    """Yield each seed that has both samplings, and the relative decrease of its groups without gradient."""
    uniform, signal = (
        {seed: share for seed, _, share in _without_gradient_shares(measurements, name, sampling)}
        for sampling in SAMPLINGS
    )
    for seed in uniform.keys() & signal.keys():
        yield seed, 1 - signal[seed] / uniform[seed] if uniform[seed] else 0.0


def _runs(measurements: Measurements, subject: str, name: str) -> list[tuple[float, ...]]:
    """Return seed, tasks solved, tasks played, steps and seconds of each run."""
    metrics = (SEED, SOLVED, TASKS, STEPS, SECONDS)
    return list(
        zip(*(measurements.values.get((metric, subject, name), []) for metric in metrics), strict=True)
    )


def _ending(measurements: Measurements, name: str) -> str:
    """Return how the validation loss ended; "" for measurements that do not record it."""
    settled = measurements.values.get((SETTLED, TAUGHT, name))
    return "" if settled is None else "stopped falling" if settled[-1] else "was still falling"


def _share(solved: float, tasks: float) -> float:
    return solved / tasks if tasks else 0.0


def _interval(solved: float, tasks: float) -> tuple[float, float]:
    return wilson_interval(round(solved), round(tasks)) if tasks else (0.0, 1.0)
