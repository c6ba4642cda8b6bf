"""Which of a number of tasks each group begins from: pass after pass over all of them, or by what they have taught."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_bridge.config.sections import Sampling

KEPT: Final = 0.25
"""p: the chance that a pass takes a task whose latest group had rewards without variance."""
KEPT_AT_LEAST: Final = 1 / 16
"""However many such groups it had in a row: in the mean no task waits for more than 16 passes."""
TASK_DRAWS: Final = 2**31 + 1
"""Beside a run's seed and a place in the passes: no sibling, and no other draw, is numbered so."""


class Passes:
    """Numbers 0, 1, 2, ... to tasks: pass after pass, each with every task once. The seed decides, and nothing else.

    Args:
        tasks: In a pass.
        seed: Decides the order of every pass.
        shuffle: Whether every pass has an order of its own; otherwise it is that of the tasks.
    """

    def __init__(self, tasks: int, *, seed: int, shuffle: bool = True) -> None:
        self._tasks, self._seed, self._shuffle = tasks, seed, shuffle
        self._pass = -1
        self._order: NDArray[np.int64] = np.arange(tasks)

    def __getitem__(self, number: int) -> int:
        """The task that stands at this number, counted from 0 over all passes."""
        at, place = divmod(number, self._tasks)
        if self._shuffle and at != self._pass:
            self._order, self._pass = np.random.default_rng([self._seed, at]).permutation(self._tasks), at
        return int(self._order[place])


class TaskSampler:
    """Gives every group of a run a task.

    By signal, a pass leaves a task out with probability 1 - max(p^z, 1/16), where z is how many of its latest groups,
    in a row, had rewards without variance, and so no gradient: the probabilistic filter of GRESO, arXiv 2506.02177,
    with p fixed at 1/4. The floor is ours: nothing is starved.

    What a group came to counts for a draw where its number is below a bound that the caller gives. With a bound below
    which all groups have ended, the draws are the same however the groups overtake each other.

    Args:
        tasks: They are numbered from 0.
        sampling: How they are drawn.
        seed: The run's.
    """

    def __init__(self, tasks: int, *, sampling: Sampling, seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._by_signal = sampling == "signal"
        self._passes = Passes(tasks, seed=seed, shuffle=sampling != "sequential")
        self._passed = 0
        """Places in the passes that were looked at."""
        self._draws: Counter[int] = Counter()
        self._dull: Counter[int] = Counter()
        self._drawn: dict[int, int] = {}
        self._results: dict[int, tuple[int, bool]] = {}
        """By group: what is not counted yet."""

    def draw(self, group: int, *, known: int) -> int:
        """The task of a group: the same however often it is asked for, until the group has ended.

        Args:
            group: Its number in the run.
            known: What groups below this number came to counts, if they have ended.
        """
        if group not in self._drawn:
            for ended in sorted(number for number in self._results if number < known):
                task, signal = self._results.pop(ended)
                self._dull[task] = 0 if signal else self._dull[task] + 1
            self._drawn[group] = task = self._next()
            self._draws[task] += 1
        return self._drawn[group]

    def _next(self) -> int:
        while True:
            number, self._passed = self._passed, self._passed + 1
            task = self._passes[number]
            dull = self._dull[task]
            if not dull:
                return task
            chance = np.random.default_rng([self._seed, number, TASK_DRAWS]).random()
            if chance < max(KEPT**dull, KEPT_AT_LEAST):
                return task

    def end(self, group: int, signal: bool | None) -> None:
        """A group is over; others, of other samplers, mean nothing.

        Args:
            group: Its number in the run.
            signal: Whether its rewards had variance; None where nobody can say.
        """
        task = self._drawn.pop(group, None)
        if self._by_signal and task is not None and signal is not None:
            self._results[group] = task, signal

    def metrics(self) -> dict[str, float]:
        """How often tasks were drawn since the beginning, and how many are drawn less often now."""
        draws = [self._draws[task] for task in range(self._tasks)]
        return {
            "tasks/draws_min": float(min(draws)),
            "tasks/draws_mean": sum(draws) / self._tasks,
            "tasks/draws_max": float(max(draws)),
            "tasks/dull_share": sum(dull > 0 for dull in self._dull.values()) / self._tasks,
        }

    def state(self) -> dict[str, Any]:
        """All that decides which tasks are drawn from here on, for `json`."""
        return {
            "passed": self._passed,
            "draws": sorted(self._draws.items()),
            "dull": sorted((task, dull) for task, dull in self._dull.items() if dull),
            "drawn": sorted(self._drawn.items()),
            "results": sorted((group, *result) for group, result in self._results.items()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state; an empty one is the beginning."""
        self._passed = state.get("passed", 0)
        self._draws = Counter(dict(state.get("draws", ())))
        self._dull = Counter(dict(state.get("dull", ())))
        self._drawn = dict(state.get("drawn", ()))
        self._results = {group: (task, signal) for group, task, signal in state.get("results", ())}
