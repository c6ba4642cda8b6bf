"""Sampling of tasks for groups: uniformly in passes over all of them, or by their learning signal."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl_bridge.config.sections import Sampling

LATEST_WEIGHT: Final = 0.5
"""What the latest group of a task is worth in the estimate of the next one's signal."""
STEEPNESS: Final = 3
"""The power of that estimate in a task's weight."""
FLOOR_SHARE: Final = 1 / 16
"""The weight that every task has, in parts of the mean weight."""


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
        """Return the task at an index, counted from 0 over all passes."""
        at, place = divmod(number, self._tasks)
        if self._shuffle and at != self._pass:
            self._order, self._pass = np.random.default_rng([self._seed, at]).permutation(self._tasks), at
        return int(self._order[place])


class TaskSampler:
    """Gives every group of a run a task.

    By signal, a task is drawn in proportion to q^3 + mean(q^3) / 16. q estimates the signal of its next group, which is
    the share of siblings that earned less than the best of them: 0 where all earned the same, so that nothing can be
    learned from them, and the more the rarer success is among them, so that the task will teach for longer. It is an
    exponential moving average over the task's groups, which begins from the mean of the tasks that have been played.
    The second term starves nothing: a task has at least a seventeenth of the draws that passes would give it. Tasks
    take turns by smooth weighted round-robin: each gains its share with every draw, and the one that has most pays 1.

    What a group came to counts for a draw where its number is below a bound that the caller gives. With a bound below
    which all groups have ended, the draws are the same however the groups overtake each other.

    Args:
        tasks: They are numbered from 0.
        sampling: How they are drawn.
        seed: The run's.
    """

    def __init__(self, tasks: int, *, sampling: Sampling, seed: int) -> None:
        self._tasks = tasks
        self._by_signal = sampling == "signal"
        self._passes = Passes(tasks, seed=seed, shuffle=sampling != "sequential")
        self._first_credit = np.random.default_rng(seed).permutation(tasks) / tasks**2  # the order of equals
        self.restore({})

    def draw(self, group: int, *, known: int) -> int:
        """Return the task of a group, the same at each call until the group has ended.

        Args:
            group: Its number in the run.
            known: What groups below this number came to counts, if they have ended.
        """
        if group not in self._drawn:
            for ended in sorted(number for number in self._results if number < known):
                task, signal = self._results.pop(ended)
                before = self._expected_signals()[task]
                self._signal[task] = before + LATEST_WEIGHT * (signal - before)
                (self._dull.discard if signal else self._dull.add)(task)
            self._drawn[group] = task = self._next_task()
            self._times[self._draws[task]] -= 1
            self._draws[task] += 1
            self._times[self._draws[task]] += 1
        return self._drawn[group]

    def _next_task(self) -> int:
        self._passed += 1
        if not self._by_signal:
            return self._passes[self._passed - 1]
        weights = self._expected_signals() ** STEEPNESS
        weights += FLOOR_SHARE * weights.mean() + np.finfo(np.float64).tiny
        self._credit += weights / weights.sum()
        task = int(self._credit.argmax())
        self._credit[task] -= 1
        return task

    def _expected_signals(self) -> NDArray[np.float64]:
        """What each task's next group is expected to have, shape [tasks]: an unplayed one's, what the others have."""
        unplayed = np.isnan(self._signal)
        signals = self._signal[~unplayed]
        return np.where(unplayed, signals.mean() if signals.size else 0.5, self._signal)

    def end(self, group: int, signal: float | None) -> None:
        """A group is over; others, of other samplers, mean nothing.

        Args:
            group: Its number in the run.
            signal: The share of siblings that earned less than the best of them; None where nobody can say.
        """
        task = self._drawn.pop(group, None)
        if self._by_signal and task is not None and signal is not None:
            self._results[group] = task, signal

    def metrics(self) -> dict[str, float]:
        """How often tasks were drawn since the beginning, and how many had no variance the last time."""
        draws = [draws for draws, tasks in self._times.items() if tasks]
        return {
            "tasks/draws_min": float(min(draws)),
            "tasks/draws_mean": self._passed / self._tasks,
            "tasks/draws_max": float(max(draws)),
            "tasks/dull_share": len(self._dull) / self._tasks,
        }

    def state(self) -> dict[str, Any]:
        """All that decides which tasks are drawn from here on, for `json`."""
        return {
            "passed": self._passed,
            "draws": sorted(self._draws.items()),
            "signal": [None if math.isnan(signal) else signal for signal in self._signal.tolist()],
            "dull": sorted(self._dull),
            "credit": self._credit.tolist() if self._by_signal else [],
            "drawn": sorted(self._drawn.items()),
            "results": sorted((group, *result) for group, result in self._results.items()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state; an empty one is the beginning."""
        self._passed: int = state.get("passed", 0)
        """Draws, and so places in the passes that are taken."""
        self._draws = Counter[int](dict(state.get("draws", ())))
        self._times = Counter({0: self._tasks - len(self._draws)}) + Counter(self._draws.values())
        """By a number of draws, how many tasks have had so many: there may be millions of tasks."""
        self._signal = np.array(state.get("signal") or [None] * self._tasks, dtype=np.float64)
        """By task, the average of its groups; NaN where none has ended."""
        self._dull = set[int](state.get("dull", ()))
        """Tasks whose latest group had no variance."""
        self._credit: NDArray[np.float64] = np.array(state.get("credit") or self._first_credit)
        self._drawn: dict[int, int] = dict(state.get("drawn", ()))
        self._results: dict[int, tuple[int, float]] = {
            group: (task, signal) for group, task, signal in state.get("results", ())
        }
        """By group: what is not counted yet."""
