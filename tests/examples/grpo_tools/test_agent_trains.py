"""A policy that learns through an agent learns what it learns through our own dialogue."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from module_run import finished

pytestmark = [pytest.mark.soak, pytest.mark.heavy]

ROOT = Path(__file__).parents[3]
TAUGHT = (
    "traces=24", "validation_traces=4", "policy.width=64", "policy.layers=1", "policy.vocabulary_tasks=0",
    "sft.batch_size=8", "sft.learning_rate=0.01", "sft.warmup_updates=5", "sft.max_updates=80",
    "sft.evaluate_every=80",
)  # fmt: skip
TOY = (
    "deterministic=true", "rollout.max_staleness=0", "algorithm.name=grpo", "trainer.iterations=2",
    "trainer.checkpoint_interval=0", "rollout.batch_size=16", "rollout.group_size=4", "env.sessions=16",
    "rollout.max_num_seqs=16", "evaluation.episodes=8", "evaluation.interval=0", "trainer.warmup_updates=0",
    "algorithm.entropy_coef=0.1",  # so that every token moves the weights, even if no answer is right
)  # fmt: skip
AGENT = "rollout.agent.function=examples.grpo_tools.agent:play"


def run(*arguments: str) -> str:
    done = finished(
        sys.executable, "-m", *arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_agent_and_dialogue_train_the_same(tmp_path: Path) -> None:
    output = f"output_dir={tmp_path}"
    run("examples.sft", "--config", "examples/sft/tools.yaml", "--name", "taught", output, *TAUGHT)
    policy = f"model.path={tmp_path / 'taught' / 'policy'}"

    def train(name: str, *arguments: str) -> tuple[list[dict[str, Any]], Any]:
        config = ("--config", "examples/grpo_tools/config.yaml", "--name", name)
        run("rl_bridge.train", *config, output, *TOY, policy, *arguments)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], json.loads((tmp_path / name / "report.json").read_text())

    ours, our_report = train("dialogue")
    theirs, their_report = train("agent", AGENT)
    assert len(ours) == len(theirs) == 2
    for own, other in zip(ours, theirs, strict=True):
        assert own["rollout/episodes_dropped"] == other["rollout/episodes_dropped"] == 0
        learned = [name for name in own if name.startswith(("loss/", "reward/", "mismatch/"))]
        learned += ["rollout/tool_calls_mean", "rollout/trajectories"]
        assert {name: own[name] for name in learned} == {name: other[name] for name in learned}
        assert other["rollout/tool_calls_mean"] > 0
        assert other["mismatch/logprob_max"] < 1e-4
    assert ours[0]["loss/total"] != ours[1]["loss/total"]
    assert our_report["solved"] == their_report["solved"]
