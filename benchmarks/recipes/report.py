"""Figures as Markdown tables, and what must show."""

from collections.abc import Iterator

from benchmarks.recipes.measures import (
    DULL,
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
)
from benchmarks.recipes.plan import RECIPES, SAMPLINGS
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts
from openenv_core.evaluation.statistics import wilson_interval

GAIN = 0.10
"""Share of tasks that reinforcement learning adds, at least, with each seed."""
ENOUGH_TASKS = 500
LESS_DULL = 1 / 3
"""By which the share of groups without gradient falls, at least, with each seed."""
ENDS = "What is under way when the time is over, an iteration or an update, is finished: seconds may be a bit above it."


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for name in RECIPES:
        for settled in figures.values.get((SETTLED, TAUGHT, name), []):
            yield Bar(f"{name}: validation loss stopped falling", settled, 1.0, "at least")
        for seed, fall in _falls(figures, name):
            yield Bar(f"{name}, seed {seed:.0f}: fewer groups without gradient", fall, LESS_DULL, "at least")
        before, after = _runs(figures, TAUGHT, name), _runs(figures, REINFORCED, name)
        if not before or not after:
            continue
        ((_, taught, tasks, _, _),) = before
        yield Bar(f"{name}: held-out tasks", min(tasks, *(run[2] for run in after)), ENOUGH_TASKS, "at least")
        for seed, solved, number, _, _ in after:
            what = f"{name}, seed {seed:.0f}"
            yield Bar(
                f"{what}: more solved", _share(solved, number) - _share(taught, tasks), GAIN, "at least"
            )
            apart = _interval(solved, number)[0] - _interval(taught, tasks)[1]
            yield Bar(f"{what}: between the intervals", apart, 0.0, "at least")


def report(figures: Figures) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    rows = []
    for name in RECIPES:
        for who in (TAUGHT, REINFORCED, IMITATED, IMITATED_TO_THE_END, *SAMPLINGS):
            for seed, solved, tasks, steps, seconds in _runs(figures, who, name):
                low, high = _interval(solved, tasks)
                rows.append(
                    (
                        name,
                        who,
                        "" if who == TAUGHT else f"{seed:.0f}",
                        f"{_share(solved, tasks):.1%}",
                        f"{low:.1%} to {high:.1%}",
                        f"{tasks:.0f}",
                        f"{steps:.0f}",
                        f"{seconds:.0f}",
                        _ending(figures, name) if who == TAUGHT else "",
                    )
                )
    heading = (
        "recipe", "policy", "seed", SOLVED, "95% interval", TASKS, "iterations or updates", SECONDS, "validation loss",
    )  # fmt: skip
    parts = ["### Held-out tasks\n\n" + table(heading, rows), ENDS]
    if drawn := [row for name in RECIPES for row in _drawn(figures, name)]:
        parts.append("### Ways to draw tasks\n\n" + table(("recipe", "tasks", "seed", GROUPS, DULL), drawn))
    return "\n\n".join([*parts, *verdicts(figures, bars(figures), ".3g")])


def _dull_shares(figures: Figures, name: str, sampling: str) -> list[tuple[float, float, float]]:
    """Seed, groups, and the share of them without gradient, of each run."""
    found = (figures.values.get((figure, sampling, name), []) for figure in (SEED, GROUPS, DULL))
    return [(seed, groups, dull / groups) for seed, groups, dull in zip(*found, strict=True)]


def _drawn(figures: Figures, name: str) -> Iterator[tuple[str, ...]]:
    for sampling in SAMPLINGS:
        for seed, groups, share in _dull_shares(figures, name, sampling):
            yield name, sampling, f"{seed:.0f}", f"{groups:.0f}", f"{share:.1%}"


def _falls(figures: Figures, name: str) -> Iterator[tuple[float, float]]:
    """Each seed, and by which part its share falls, of those that were drawn both ways."""
    uniform, signal = (
        {seed: share for seed, _, share in _dull_shares(figures, name, one)} for one in SAMPLINGS
    )
    for seed in uniform.keys() & signal.keys():
        yield seed, 1 - signal[seed] / uniform[seed] if uniform[seed] else 0.0


def _runs(figures: Figures, who: str, name: str) -> list[tuple[float, ...]]:
    """Seed, solved, played, steps and seconds of each run."""
    wanted = (SEED, SOLVED, TASKS, STEPS, SECONDS)
    return list(zip(*(figures.values.get((figure, who, name), []) for figure in wanted), strict=True))


def _ending(figures: Figures, name: str) -> str:
    """Whether the loss of validation had stopped falling: nothing of figures from before that was noted."""
    settled = figures.values.get((SETTLED, TAUGHT, name))
    return "" if settled is None else "stopped falling" if settled[-1] else "was falling still"


def _share(solved: float, tasks: float) -> float:
    return solved / tasks if tasks else 0.0


def _interval(solved: float, tasks: float) -> tuple[float, float]:
    return wilson_interval(round(solved), round(tasks)) if tasks else (0.0, 1.0)
