"""Sampling of tasks for groups, in passes over all of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_bridge.config.sections import Sampling


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
    """Assigns a task to every group of a run, in passes over all tasks.

    Args:
        tasks: Number of tasks, which are numbered from 0.
        sampling: The order of a pass.
        seed: The run's seed.
    """

    def __init__(self, tasks: int, *, sampling: Sampling, seed: int) -> None:
        self._tasks = tasks
        self._passes = Passes(tasks, seed=seed, shuffle=sampling != "sequential")
        self.restore({})

    @property
    def drawn_groups(self) -> set[int]:
        """The groups that have a task and have not ended."""
        return set(self._task_by_group)

    def draw(self, group: int) -> int:
        """Return the task of a group, by its number in the run; the same at each call until the group has ended."""
        if group not in self._task_by_group:
            self._task_by_group[group] = task = self._passes[self._draw_count]
            self._draw_count += 1
            self._task_counts[self._draws[task]] -= 1
            self._draws[task] += 1
            self._task_counts[self._draws[task]] += 1
        return self._task_by_group[group]

    def end(self, group: int, has_variance: bool | None) -> None:
        """Note that a group has ended; groups of other samplers are ignored.

        Args:
            group: The group's number in the run.
            has_variance: Whether its siblings' rewards differ; None if unknown.
        """
        task = self._task_by_group.pop(group, None)
        if task is not None and has_variance is not None:
            (self._dull.discard if has_variance else self._dull.add)(task)

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
            "dull": sorted(self._dull),
            "drawn": sorted(self._task_by_group.items()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an empty one is the initial state."""
        self._draw_count: int = state.get("passed", 0)
        """Number of draws so far, and so the position in the passes."""
        self._draws = Counter[int](dict(state.get("draws", ())))
        self._task_counts = Counter({0: self._tasks - len(self._draws)}) + Counter(self._draws.values())
        """Number of tasks by number of draws, so that `metrics` need not scan millions of tasks."""
        self._dull = set[int](state.get("dull", ()))
        """Tasks whose latest group had no variance."""
        self._task_by_group: dict[int, int] = dict(state.get("drawn", ()))
