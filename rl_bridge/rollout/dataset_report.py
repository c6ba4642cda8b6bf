"""What a run on a dataset says of itself, where there is no task of an environment to say it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.rollout.task import EvaluationResult, Policy
from rl_bridge.types import Trajectory

REPORT_FILE = "report.json"


class DatasetReport:
    """Keeps the mean reward of each iteration, and writes the last at the end.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[str, Any] = {}

    def figures(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Nothing beside what every run logs."""
        rewards = [trajectory.reward for trajectory in trajectories]
        self._last = {"answers": len(rewards), "mean_reward": sum(rewards) / len(rewards)}
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Nothing is known of the greedy policy beside the rewards."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write what the last iteration's answers earned."""
        text = json.dumps({"last_iteration": self._last, "train_seconds": result.train_seconds}, indent=1)
        (self._folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
