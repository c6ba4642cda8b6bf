"""A run on a dataset, from its file to its report: trained, refused with other examples, gone on with."""

import json
import subprocess
from pathlib import Path

import pytest
from module_run import run_module

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

# Siblings must not all earn the same.
REWARD = "def short(prompt, response, target):\n    return float(len(response) % 3) + (target == 'b')\n"
CONFIG = """
name: prompts
data: {source: prompts.jsonl}
rollout: {batch_size: 16, group_size: 4, max_new_tokens: 6, max_length: 64, max_num_seqs: 16}
trainer: {iterations: 2, checkpoint_interval: 1, tokens_per_pass: 2048, num_gpus: 0}
reward: {function: my_rewards.short}
"""
TIMEOUT_S = 300.0


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_module("rl_bridge.train", *arguments, cwd=folder, timeout_s=TIMEOUT_S)


def prompts(targets: str) -> str:
    return "".join(json.dumps({"prompt": f"say {target}", "target": target}) + "\n" for target in targets)


def test_a_run_goes_on_with_its_own_examples_and_no_others(tmp_path: Path) -> None:
    from examples.sft.tiny_policy import make_tool_policy
    from rl_bridge.data.traces import Trace

    read = Trace(tools=(), messages=({"role": "user", "content": "say a b c d e f g h i j"},), reward=1.0)
    policy = make_tool_policy(tmp_path / "policy", [read], seed=1, width=64, layers=1)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "config.yaml").write_text(CONFIG)
    examples, run = tmp_path / "prompts.jsonl", tmp_path / "runs" / "one"
    examples.write_text(prompts("abcdefgh"))

    first_run = train(tmp_path, "--config", "config.yaml", "--name", "one", f"model.path={policy}")
    assert first_run.returncode == 0, first_run.stdout[-2000:] + first_run.stderr[-3000:]
    report = json.loads((run / "report.json").read_text())
    assert report["last_iteration"]["answers"] == 16

    examples.write_text(prompts("abcdefghi"))
    refused = train(tmp_path, "--resume", str(run), "trainer.iterations=3")
    assert refused.returncode == 2, refused.stdout[-2000:] + refused.stderr[-3000:]
    assert "expected the dataset that the checkpoint knows, with digest=" in refused.stderr

    examples.rename(tmp_path / "elsewhere.jsonl").write_text(prompts("abcdefgh"))
    arguments = [f"data.source={tmp_path / 'elsewhere.jsonl'}", "trainer.iterations=3"]
    resumed = train(tmp_path, "--resume", str(run), *arguments)
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
