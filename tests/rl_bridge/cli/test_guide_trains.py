"""The guide's file, with overrides for model, environment, reward, nodes and GPUs, trains on this machine."""

import json
from pathlib import Path

import pytest
from module_run import ROOT, run_module

from openenv_core.evaluation.records import FIGURES_FILE, EvaluationFolder
from rl_bridge.config import load_config

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

GUIDE = ROOT / "tests" / "rl_bridge" / "config" / "guide.yaml"
HERE = ["--monarch.num_nodes", "1", "--monarch.gpus_per_node", "0", "--trainer.num_gpus", "0"]
SMALL = [
    *("rollout.num_workers=2", "rollout.batch_size=16", "env.sessions=8", "trainer.tokens_per_pass=2048"),
    *("trainer.iterations=2", "evaluation.episodes=4", "evaluation.interval=0"),
]
REWARD = "def compute_reward(prompt, response, target):\n    return 0.125\n"
TIMEOUT_S = 500.0


def test_a_world_of_tools_without_a_task(tmp_path: Path) -> None:
    """Begun as the guide says, from a folder with the user's own reward function."""
    from examples.sft.tiny_policy import make_tool_policy
    from rl_bridge.data.traces import Trace

    read = Trace(tools=(), messages=({"role": "user", "content": "how many rows has the table"},), reward=1.0)
    policy = make_tool_policy(tmp_path / "policy", [read], seed=1, width=64, layers=1)
    (tmp_path / "guide_reward.py").write_text(REWARD)
    begin = ["--config", str(GUIDE), "--name", "guide", "reward.function=guide_reward.compute_reward"]
    world = ["env.app=envs.sqlite_env.server.app:app", "--env.reset.difficulty", "easy"]
    model = ["--model.path", str(policy), "rollout.max_length=1024"]
    words = [*begin, *HERE, *SMALL, *world, *model]
    done = run_module("rl_bridge.train", *words, cwd=tmp_path, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "guide"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    # A penalty is a half at the least: what else there is, the reward function gave.
    assert all((row["reward/mean"] - 0.125) * 16 % 0.5 == pytest.approx(0.0, abs=1e-6) for row in rows)
    report = json.loads((run / "report.json").read_text())
    versions = [one.version for one in EvaluationFolder(run / "evaluation").read().records.values()]
    assert (report["episodes"], versions) == (4, [2] * 4)
    assert json.loads((run / "evaluation" / FIGURES_FILE).read_text())["mean_reward"] == report["mean_reward"]
    config = load_config(run / "config.yaml")
    assert (config.rollout.num_turns, config.trainer.gradient_accumulation_steps) == (8, 4)
    assert config.model.dtype == "bfloat16"
