"""Kuhn poker by self-play of a tiny policy comes close to an equilibrium, whatever the seed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import Watched

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(3600)]

TRAINING_TIMEOUT_S = 1800.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exploitability_falls(seed: int, ropewalk: Callable[..., Watched], tmp_path: Path) -> None:
    words = ("--config", "examples/grpo_kuhn/config.yaml", f"output_dir={tmp_path}", f"seed={seed}")
    run = ropewalk("train", *words, "--name", "run")
    assert run.wait(TRAINING_TIMEOUT_S) == 0, run.output()[-3000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exploitability"] <= 0.05, report
    assert report["legal"] >= 0.99
