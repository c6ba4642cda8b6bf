"""The recipes of reinforcement learning at toy size: a policy that was taught a little, an iteration, a report."""

import json
import os
import sys
from pathlib import Path

import pytest
from module_run import finished

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]
TOY = (
    "trainer.iterations=1", "trainer.checkpoint_interval=0", "rollout.batch_size=4", "rollout.group_size=2",
    "env.sessions=4", "rollout.max_num_seqs=4", "evaluation.episodes=4",
)  # fmt: skip
TAUGHT = (
    "traces=4", "validation_traces=2", "policy.width=64", "policy.layers=1", "policy.vocabulary_tasks=0",
    "sft.batch_size=4", "sft.learning_rate=0.01", "sft.warmup_updates=5",
)  # fmt: skip


def run(*words: str) -> str:
    done = finished(
        sys.executable, "-m", *words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "updates"),
    [("tools", 6), *(pytest.param(name, 60, marks=pytest.mark.soak) for name in ("tools", "code"))],
)
def test_a_taught_policy_goes_on_by_reinforcement(name: str, updates: int, tmp_path: Path) -> None:
    output = f"output_dir={tmp_path}"
    teach = (output, *TAUGHT, f"sft.max_updates={updates}", f"sft.evaluate_every={updates}")
    run("examples.sft", "--config", f"examples/sft/{name}.yaml", "--name", "taught", *teach)
    words = ("--config", f"examples/grpo_{name}/config.yaml", "--name", "run", output, *TOY)
    printed = run("rl_bridge.train", *words, f"model.path={tmp_path / 'taught' / 'policy'}")
    assert "4 held-out tasks solved" in printed
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert sum(report["endings"].values()) == report["tasks"] == 4
    # Nothing failed that is not the policy's.
    assert report["dropped"] == 0
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (row["iteration"], row["rollout/episodes_dropped"]) == (1, 0)
    if updates > 10:  # then it calls tools, if rarely the right ones
        assert row["rollout/tool_calls_mean"] > 0
