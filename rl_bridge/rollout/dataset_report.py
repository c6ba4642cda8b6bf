"""What a run on a dataset says of itself, where there is no task of an environment to say it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.rollout.task import REPORT_FILE, EvaluationResult, Policy
from rl_bridge.types import Trajectory


class DatasetReport:
    """Writes the mean reward of the last iteration at the end.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def figures(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Nothing beside what every run logs."""
        return {}

    async def probe(self, policy: Policy) -> Mapping[str, float]:
        """Nothing is known of the greedy policy beside the rewards."""
        return {}

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write what the last iteration's answers earned."""
        report = {"last_iteration": self._last_iteration(), "train_seconds": result.train_seconds}
        (self._folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _last_iteration(self) -> dict[str, Any]:
        """From the log: a process that resumes a run whose last iteration is trained has not seen its answers."""
        rows = (self._folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if not rows:  # somebody has taken the log away
            return {}
        last = json.loads(rows[-1])
        return {"answers": round(last["rollout/trajectories"]), "mean_reward": last["reward/mean"]}
