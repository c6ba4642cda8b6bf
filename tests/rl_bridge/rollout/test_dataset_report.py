"""What a run on a dataset comes to is what its log says of the last iteration, whoever trained that."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.metrics import JsonlSink
from rl_bridge.rollout.dataset_report import DatasetReport
from rl_bridge.rollout.groups import rollout_figures
from rl_bridge.rollout.task import EvaluationResult
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def group(number: int, *rewards: float) -> Group:
    answer = Completion(tokens=[7], logprobs=[-0.5], versions=[0], stopped=True)
    turns = [Turn(prompt=[1, 2], completion=answer)]
    trajectories = [
        Trajectory(seed=number, turns=turns, ending=Ending.COMPLETED, reward=reward) for reward in rewards
    ]
    return Group(id=number, seed=number, trajectories=trajectories)


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        ([[(1.0, 1.0)], [(0.0, 1.0), (0.5, 0.5, 1.0)]], {"answers": 5, "mean_reward": 0.6}),
        ([], {}),
    ],
)
async def test_report_of_a_run_that_another_process_trained(
    tmp_path: Path, iterations: list[list[tuple[float, ...]]], expected: dict[str, Any]
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for version, groups in enumerate(iterations):
        trained = [group(number, *rewards) for number, rewards in enumerate(groups)]
        sink.write(version + 1, rollout_figures(trained, version=version))
    sink.close()
    result = EvaluationResult(rewards=[], endings=[], dropped=0, train_seconds=8.5)
    await DatasetReport(tmp_path).report(None, result)  # type: ignore[arg-type]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == {"last_iteration": expected, "train_seconds": 8.5}
