"""Sampling of tasks for groups: in passes over all of them, or by their learning signal."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_bridge.config.sections import Sampling

LATEST_WEIGHT: Final = 0.5
"""The weight of a task's latest group in the moving average of its signal."""
STEEPNESS: Final = 3
"""The exponent of that average in a task's weight."""
FLOOR_SHARE: Final = 1 / 16
"""What is added to the weight of every task, as a share of the mean weight before that."""


class Passes:
    """Maps draws 0, 1, 2, ... to tasks, in passes that have every task once. The seed alone determines the order.

    Args:
        tasks: Number of tasks.
        seed: Determines the order of every pass.
        shuffle: Whether to shuffle every pass anew; otherwise tasks come in their own order.
    """

    def __init__(self, tasks: int, *, seed: int, shuffle: bool = True) -> None:
        self._tasks, self._seed, self._shuffle = tasks, seed, shuffle
        self._pass = -1
        self._order: NDArray[np.int64] = np.arange(tasks)

    def __getitem__(self, number: int) -> int:
        """Return the task at an index, counted from 0 over all passes."""
        pass_number, position = divmod(number, self._tasks)
        if self._shuffle and pass_number != self._pass:
            self._order = np.random.default_rng([self._seed, pass_number]).permutation(self._tasks)
            self._pass = pass_number
        return int(self._order[position])


class TaskSampler:
    """Assigns a task to every group of a run.

    By signal, a task is drawn in proportion to q^3 + mean(q^3) / 16. q estimates the signal of its next group, the
    share of siblings that earn less than the best of them: 0 if all earn the same, so that nothing can be learned, and
    higher the rarer success is, so that the task teaches for longer. q is an exponential moving average over the task's
    groups and starts at the mean of the tasks played so far. The second term avoids starvation: a task gets at least
    1/17 of the draws that passes would give it. Draws are a smooth weighted round-robin: with every draw each task's
    credit grows by its share, and the task with the most credit is drawn and pays 1.

    A draw takes into account the results of groups whose number is below a bound given by the caller. If all groups
    below the bound have ended, draws do not depend on the order in which groups end.

    Args:
        tasks: Number of tasks, which are numbered from 0.
        sampling: How they are drawn.
        seed: The run's seed.
    """

    def __init__(self, tasks: int, *, sampling: Sampling, seed: int) -> None:
        self._tasks = tasks
        self._by_signal = sampling == "signal"
        self._passes = Passes(tasks, seed=seed, shuffle=sampling != "sequential")
        self._first_credit = np.random.default_rng(seed).permutation(tasks) / tasks**2  # orders equal tasks
        self.restore({})

    @property
    def drawn_groups(self) -> set[int]:
        """The groups that have a task and have not ended."""
        return set(self._task_by_group)

    def draw(self, group: int, *, known: int) -> int:
        """Return the task of a group, the same at each call until the group has ended.

        Args:
            group: The group's number in the run.
            known: Results of groups below this number are taken into account, if they have ended.
        """
        if group not in self._task_by_group:
            for ended_group in sorted(number for number in self._results if number < known):
                task, signal = self._results.pop(ended_group)
                previous = self._expected_signals()[task]
                self._signal[task] = previous + LATEST_WEIGHT * (signal - previous)
                self._mark_dull(task, signal)
            self._task_by_group[group] = task = self._next_task()
            self._task_counts[self._draws[task]] -= 1
            self._draws[task] += 1
            self._task_counts[self._draws[task]] += 1
        return self._task_by_group[group]

    def _next_task(self) -> int:
        self._draw_count += 1
        if not self._by_signal:
            return self._passes[self._draw_count - 1]
        weights = self._expected_signals() ** STEEPNESS
        weights += FLOOR_SHARE * weights.mean() + np.finfo(np.float64).tiny
        self._credit += weights / weights.sum()
        task = int(self._credit.argmax())
        self._credit[task] -= 1
        return task

    def _expected_signals(self) -> NDArray[np.float64]:
        """Return the expected signal of each task's next group, shape [tasks]; of unplayed tasks the others' mean."""
        unplayed = np.isnan(self._signal)
        signals = self._signal[~unplayed]
        return np.where(unplayed, signals.mean() if signals.size else 0.5, self._signal)

    def end(self, group: int, signal: float | None) -> None:
        """Note that a group has ended; groups of other samplers are ignored.

        Args:
            group: The group's number in the run.
            signal: The share of siblings that earned less than the best of them; None if unknown.
        """
        task = self._task_by_group.pop(group, None)
        if task is None or signal is None:
            return
        if self._by_signal:
            self._results[group] = task, signal
        else:
            self._mark_dull(task, signal)

    def _mark_dull(self, task: int, signal: float) -> None:
        (self._dull.discard if signal else self._dull.add)(task)

    def metrics(self) -> dict[str, float]:
        """Return how often tasks were drawn since the beginning, and the share whose last group had no variance."""
        draws = [draws for draws, tasks in self._task_counts.items() if tasks]
        return {
            "tasks/draws_min": float(min(draws)),
            "tasks/draws_mean": self._draw_count / self._tasks,
            "tasks/draws_max": float(max(draws)),
            "tasks/dull_share": len(self._dull) / self._tasks,
        }

    def state(self) -> dict[str, Any]:
        """Return everything that determines future draws, as JSON values."""
        return {
            "passed": self._draw_count,
            "draws": sorted(self._draws.items()),
            "signal": [None if math.isnan(signal) else signal for signal in self._signal.tolist()],
            "dull": sorted(self._dull),
            "credit": self._credit.tolist() if self._by_signal else [],
            "drawn": sorted(self._task_by_group.items()),
            "results": sorted((group, *result) for group, result in self._results.items()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an empty one is the initial state."""
        self._draw_count: int = state.get("passed", 0)
        """Number of draws so far, and so the position in the passes."""
        self._draws = Counter[int](dict(state.get("draws", ())))
        self._task_counts = Counter({0: self._tasks - len(self._draws)}) + Counter(self._draws.values())
        """Number of tasks by number of draws, so that `metrics` need not scan millions of tasks."""
        self._signal = np.array(state.get("signal") or [None] * self._tasks, dtype=np.float64)
        """Moving average of the signal by task; NaN if none of its groups has ended."""
        self._dull = set[int](state.get("dull", ()))
        """Tasks whose latest group had no variance."""
        self._credit: NDArray[np.float64] = np.array(state.get("credit") or self._first_credit)
        self._task_by_group: dict[int, int] = dict(state.get("drawn", ()))
        self._results: dict[int, tuple[int, float]] = {
            group: (task, signal) for group, task, signal in state.get("results", ())
        }
        """Results by group, not yet taken into account."""
