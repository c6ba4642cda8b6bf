"""A published model gets better at code and tools that it half knows, read by the same parser before and after."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.conftest import Watched, rows
from e2e.half_known_worlds import one_step_task
from published import published_model

from openenv_core.evaluation.records import EvaluationFolder, rewards_by_task
from openenv_core.evaluation.statistics import paired_statistics
from rl_bridge.rollout.assignment import TRAINING_SEEDS

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(7200)]

logger = logging.getLogger(__name__)

ITERATIONS = 20
EVALUATION_TIMEOUT_S = 1800.0
TRAINING_TIMEOUT_S = 3600.0
MOST_MISMATCH = 1e-4

COMMON: dict[str, Any] = {
    "algorithm": {"name": "grpo", "normalize_std": False, "aggregation": "token_mean"},
    "trainer": {
        "iterations": ITERATIONS,
        "learning_rate": 1e-5,
        "warmup_updates": 2,
        "checkpoint_interval": 0,
        "num_threads": 2,
        "tokens_per_pass": 2048,
    },
    "monarch": {"start_timeout_s": EVALUATION_TIMEOUT_S},
    "reward": {"illegal_answer": 0.0},
    "evaluation": {"interval": 0, "episodes": 128},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "code": COMMON
    | {
        "env": {"app": "half_known_worlds:one_step_app", "sessions": 32},
        "rollout": {
            "task": "half_known_worlds:OneStepTask",
            "batch_size": 64,
            "group_size": 8,
            "num_turns": 1,
            "max_new_tokens": 24,
            "cut_answer": "illegal",
            "max_length": 192,
            "max_num_seqs": 32,
        },
    },
    "tools": COMMON
    | {
        "env": {
            "app": "half_known_worlds:one_table_app",
            "sessions": 32,
            "reset": {"difficulty": "easy", "max_calls": 2},
        },
        "model": {"tool_calls": "hermes", "repair_tool_calls": True},
        "rollout": {
            "task": "half_known_worlds:OneTableTask",
            "batch_size": 64,
            "group_size": 8,
            "num_turns": 2,
            "max_new_tokens": 64,
            "max_length": 640,
            "max_num_seqs": 32,
        },
    },
}


def code_asked(seed: int) -> str:
    return one_step_task(seed % TRAINING_SEEDS, held_out=True).prompt


WHAT_IS_ASKED: dict[str, Callable[[int], object]] = {"code": code_asked, "tools": lambda seed: seed}
"""Of a held-out seed. Seeds that ask the same are one task: a greedy policy answers them alike."""


def rewards_of(evaluation: Path, name: str) -> dict[object, list[float]]:
    rewards: defaultdict[object, list[float]] = defaultdict(list)
    for (_, seed), earned in rewards_by_task(EvaluationFolder(evaluation).read().records.values()).items():
        rewards[WHAT_IS_ASKED[name](seed)] += earned
    return rewards


@pytest.mark.parametrize("name", CONFIGS)
def test_held_out_reward_rises(
    ropewalk: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIGS[name]))
    words = ("--config", str(file), f"output_dir={tmp_path}", f"model.path={published_model()}")
    evaluation = ropewalk("eval", *words, "--name", "before")
    assert evaluation.wait(EVALUATION_TIMEOUT_S) == 0, evaluation.output()[-3000:]
    run = ropewalk("train", *words, "--name", "run")
    assert run.wait(TRAINING_TIMEOUT_S) == 0, run.output()[-3000:]
    metrics = rows(tmp_path / "run")
    assert len(metrics) == ITERATIONS
    assert max(row["mismatch/logprob_max"] for row in metrics) <= MOST_MISMATCH

    evaluations = (tmp_path / "before", tmp_path / "run" / "evaluation")
    paired = paired_statistics(*(rewards_of(folder, name) for folder in evaluations))
    logger.info("%s", paired)
    assert paired["tasks"] >= 30, paired
    assert 0.1 <= paired["first_mean"] <= 0.7, paired  # neither unknown to the model nor already learned
    low, _ = paired["ci95"]
    assert low > 0, paired
