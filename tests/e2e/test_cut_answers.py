"""A policy that rambles learns to stop, whatever `rollout.cut_answer` calls its answers until then."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from e2e.conftest import Watched, rows
from e2e.cut_answers_world import ILLEGAL_ANSWER

pytestmark = [pytest.mark.soak, pytest.mark.heavy, pytest.mark.timeout(900)]

ITERATIONS = 20
CONFIG = {
    "env": {"app": "cut_answers_world:app", "sessions": 128},
    "rollout": {
        "task": "cut_answers_world:OneWordTask",
        "batch_size": 512,
        "group_size": 8,
        "num_turns": 1,
        "max_new_tokens": 6,
        "max_length": 32,
    },
    "algorithm": {"name": "grpo", "normalize_std": False},
    "trainer": {
        "iterations": ITERATIONS,
        "updates_per_iteration": 4,
        "learning_rate": 2e-3,
        "warmup_updates": 5,
        "num_gpus": 0,
    },
    "reward": {"illegal_answer": ILLEGAL_ANSWER},
    "evaluation": {"interval": 0, "episodes": 0},
}


@pytest.mark.parametrize("cut_answer", ["illegal", "truncated"])
def test_share_of_cut_answers_falls_and_none_pays_more_than_an_illegal_one(
    ropewalk: Callable[..., Watched],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut_answer: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    run = ropewalk(
        "train",
        "--config",
        str(file),
        "--name",
        "run",
        f"output_dir={tmp_path}",
        f"rollout.cut_answer={cut_answer}",
    )
    assert run.wait(600) == 0, run.output()[-3000:]
    iterations = rows(tmp_path / "run")
    assert len(iterations) == ITERATIONS
    cut = [row["world/cut"] for row in iterations]
    rewards = [row["reward/mean"] for row in iterations]
    assert cut[0] > 0.2  # at random, many do not end within their tokens
    assert fmean(cut[-5:]) < cut[0] / 4
    assert fmean(rewards[-5:]) > rewards[0] + 0.5
    for row in iterations:
        assert row["world/most_for_nothing"] == ILLEGAL_ANSWER
        truncated = row["world/cut_for_nothing"] if cut_answer == "truncated" else 0.0
        assert row["rollout/ending/truncated_length"] == pytest.approx(truncated)
