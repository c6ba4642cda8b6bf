"""The share of held-out tasks that a policy solves, with its interval."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from openenv_core.evaluation.statistics import wilson_interval
from rl_bridge.rollout import EvaluationResult


def summarize(result: EvaluationResult) -> dict[str, Any]:
    """Return the report as plain values.

    A task is solved if its episode earned 1. Unscored episodes count as unsolved tasks; episodes dropped because of an
    infrastructure failure do not count.
    """
    tasks = len(result.rewards) + result.unscored
    solved = sum(reward >= 1.0 for reward in result.rewards)
    return {
        "tasks": tasks,
        "solved": solved,
        "success": solved / tasks if tasks else None,
        "ci95": wilson_interval(solved, tasks) if tasks else None,
        "endings": {str(ending): result.endings.count(ending) for ending in sorted(set(result.endings))},
        "dropped": result.dropped,
        "unscored": result.unscored,
        "train_seconds": result.train_seconds,
    }


def write_report(
    folder: Path, result: EvaluationResult, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write report.json (the summary and `more`) and learning_curve.png into the run's folder, and print a summary."""
    report = {**summarize(result), **more}
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console = Console()
    written = [folder / "report.json"]
    if (folder / "metrics.jsonl").is_file():  # absent if a checkpoint is only evaluated
        # Every process of a run imports its task, hence this module; only the controller, at the end, needs matplotlib.
        from examples.sft.pictures import draw_success_curves

        written.append(folder / "learning_curve.png")
        draw_success_curves({folder.name: folder}, written[-1], title=folder.name)
    if not report["tasks"]:
        console.print("no held-out task was played", highlight=False)
        return
    low, high = report["ci95"]
    console.print(
        f"{report['solved']} of {report['tasks']} held-out tasks solved: {report['success']:.1%} "
        f"(95% interval {low:.1%} to {high:.1%}); {report['train_seconds']:.0f} s of training",
        highlight=False,
    )
    for path in written:
        console.print(f"  {path}", highlight=False, soft_wrap=True)
