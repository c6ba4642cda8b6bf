"""The recipes of reinforcement learning at toy size: a policy that can say nothing yet, two iterations, a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOY = (
    "trainer.iterations=2", "trainer.checkpoint_interval=0", "rollout.batch_size=8", "rollout.group_size=4",
    "env.sessions=8", "rollout.max_num_seqs=8", "evaluation.episodes=8",
)  # fmt: skip
TAUGHT = (
    "traces=8", "validation_traces=2", "policy.width=64", "policy.layers=1", "policy.vocabulary_tasks=0",
    "sft.batch_size=4", "sft.learning_rate=0.01", "sft.warmup_updates=5", "sft.max_updates=60",
    "sft.evaluate_every=30",
)  # fmt: skip


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tools", pytest.param("code", marks=pytest.mark.soak)])
def test_a_taught_policy_goes_on_by_reinforcement(name: str, tmp_path: Path) -> None:
    run(
        "examples.sft",
        "--config",
        f"examples/sft/{name}.yaml",
        "--name",
        "taught",
        f"output_dir={tmp_path}",
        *TAUGHT,
    )
    said = run(
        "rl_bridge.train", "--config", f"examples/grpo_{name}/config.yaml", "--name", "run", f"output_dir={tmp_path}",
        f"model.path={tmp_path / 'taught' / 'policy'}", *TOY,
    )  # fmt: skip
    assert "8 held-out tasks solved" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["tasks"] == 8
    assert sum(report["endings"].values()) == 8
    # Nothing failed that is not the policy's.
    assert report["dropped"] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(row["rollout/episodes_dropped"] == 0 for row in rows)
    # After sixty updates on eight traces it calls tools, if rarely the right ones.
    assert sum(row["rollout/tool_calls_mean"] for row in rows) > 0
