"""Kuhn poker by self-play, as it is configured: the last policy is close to an equilibrium."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import Watched, rows

from envs.kuhn_env.oracle import nash_conv, uniform

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3000)]

CONFIG = "examples/grpo_kuhn/config.yaml"
CLOSE_ENOUGH = 0.05
"""NashConv / 2 of the last policy, in antes; 11/24 for one that bets half of the time."""
TRAINING_TIMEOUT_S = 2400.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_self_play_comes_close_to_an_equilibrium(
    ropewalk: Callable[..., Watched], tmp_path: Path, seed: int
) -> None:
    run = ropewalk("train", "--config", CONFIG, "--name", "run", f"output_dir={tmp_path}", f"seed={seed}")
    assert run.wait(TRAINING_TIMEOUT_S) == 0, run.output()[-3000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exploitability"] <= CLOSE_ENOUGH < nash_conv(uniform) / 2
    metrics = rows(tmp_path / "run")
    assert metrics[-1]["rollout/ending/illegal_answer"] <= 0.01
    assert max(row["mismatch/logprob_max"] for row in metrics) <= 1e-4
