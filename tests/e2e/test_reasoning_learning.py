"""A published chat model learns a task of reasoning-gym, also from the rewards of noisy verifiers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import Watched, rows
from published import published_model

from openenv_core.evaluation.records import EvaluationFolder, compare

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3 * 3600)]

CONFIG = "examples/grpo_reasoning/config.yaml"
EVALUATION_TIMEOUT_S = 1800.0
TRAINING_TIMEOUT_S = 7200.0


@pytest.mark.parametrize("app", ["app", "noisy_app"])
def test_held_out_exact_match_rises(app: str, ropewalk: Callable[..., Watched], tmp_path: Path) -> None:
    words = ("--config", CONFIG, f"output_dir={tmp_path}", f"model.path={published_model()}")
    words = (*words, f"env.app=examples.grpo_reasoning.world:{app}")
    before = ropewalk("eval", *words, "--name", "before")
    assert before.wait(EVALUATION_TIMEOUT_S) == 0, before.output()[-3000:]
    run = ropewalk("train", *words, "--name", "run")
    assert run.wait(TRAINING_TIMEOUT_S) == 0, run.output()[-3000:]
    found = compare(EvaluationFolder(tmp_path / "before"), EvaluationFolder(tmp_path / "run" / "evaluation"))
    (change,) = found.values()
    constant = json.loads((tmp_path / "run" / "report.json").read_text())["best_constant"]
    assert (change["tasks"], change["unpaired"]) == (400, 0)
    assert constant["distinct_answers"] >= 20
    assert change["first_mean"] >= 0.10
    assert change["ci95"][0] > 0, change
    assert change["difference"] >= 0.15, change
    assert change["second_mean"] >= constant["success"] + 0.10
    assert max(row["mismatch/logprob_max"] for row in rows(tmp_path / "run")) <= 1e-3
