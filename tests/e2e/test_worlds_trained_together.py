"""One run on several environments, one of which is down: trained, resumed, evaluated, each by its name."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.conftest import Watched, rows

from rl_bridge.records import read_lines
from rl_bridge.rollout.assignment import draw_environment

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(1200)]

RUN_TIMEOUT_S = 500.0
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "blackjack": {
        "app": "envs.blackjack_env.server.app:app",
        "task": "examples.grpo_blackjack.task:BlackjackTask",
        "weight": 3,
    },
    "sqlite": {"app": "envs.sqlite_env.server.app:app", "reset": {"difficulty": "easy"}},
}
DOWN = {"url": "http://127.0.0.1:9", "connect_timeout_s": 1, "weight": 4}
CONFIG = {
    "rollout": {
        "batch_size": 64,
        "group_size": 4,
        "num_turns": 3,
        "max_new_tokens": 6,
        "max_length": 1000,
        "max_num_seqs": 32,
    },
    "trainer": {"iterations": 2, "tokens_per_pass": 8192, "checkpoint_interval": 1},
    "evaluation": {"interval": 0, "episodes": 8},
    "records": {"groups": 64},
}


def written(folder: Path, environments: dict[str, Any]) -> tuple[str, ...]:
    from examples.sft.tiny_policy import make_tool_policy
    from rl_bridge.data.traces import Trace

    read = Trace(tools=(), messages=({"role": "user", "content": "how many rows has the table"},), reward=1.0)
    policy = make_tool_policy(folder / "policy", [read], seed=1, width=64, layers=1)
    sessions = {name: {"sessions": 16, **env} for name, env in environments.items()}
    file = folder / "several.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "env": sessions}))
    return ("--config", str(file), "--name", "run", f"output_dir={folder}", f"model.path={policy}")


def drawn_environments(run: Path) -> dict[int, str]:
    """The environment of every group that was trained."""
    records = [json.loads(line) for line in read_lines(run)]
    return {record["group"]: record["environment"] for record in records}


def test_resumed_run_goes_on_with_the_same_draws_and_evaluates_each_environment(
    ropewalk: Callable[..., Watched], tmp_path: Path
) -> None:
    first = ropewalk("train", *written(tmp_path, ENVIRONMENTS))
    assert first.wait(RUN_TIMEOUT_S) == 0, first.output()[-3000:]
    run = tmp_path / "run"
    resumed = ropewalk("train", "--resume", str(run), "trainer.iterations=4")
    assert resumed.wait(RUN_TIMEOUT_S) == 0, resumed.output()[-3000:]
    assert drawn_environments(run) == {
        group: draw_environment(0, group, {"blackjack": 3.0, "sqlite": 1.0}) for group in range(64)
    }
    counted = Counter(drawn_environments(run).values())
    assert 48 - 13 < counted["blackjack"] < 48 + 13  # 99.98% of the binomial interval
    all_rows = rows(run)
    for name in ENVIRONMENTS:
        own = rows(run / "environments" / name)
        groups = [row["rollout/groups"] for row in own]
        assert groups == [row[f"env/{name}/rollout/groups"] for row in all_rows]
        assert sum(groups) == counted[name]
        assert [row["loss/total"] for row in own] == [row["loss/total"] for row in all_rows]
    report = json.loads((run / "report.json").read_text())
    assert {name: one["episodes"] for name, one in report["environments"].items()} == dict.fromkeys(
        ENVIRONMENTS, 8
    )
    assert report["episodes"] == 16
    assert json.loads((run / "environments" / "blackjack" / "report.json").read_text())["hands"] == 8


def test_run_goes_on_without_the_environment_that_is_down(
    ropewalk: Callable[..., Watched], tmp_path: Path
) -> None:
    words = written(tmp_path, {**ENVIRONMENTS, "down": DOWN})
    run = ropewalk("train", *words)
    assert run.wait(RUN_TIMEOUT_S) == 0, run.output()[-3000:]
    assert run.output().count("the environment down is set aside") == 1
    assert set(drawn_environments(tmp_path / "run").values()) == set(ENVIRONMENTS)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["episodes"], report["environments"]["down"]["dropped"]) == (16, 8)

    evaluation = ropewalk("evaluate", *words[:2], *words[4:], "--name", "evaluation")
    assert evaluation.wait(RUN_TIMEOUT_S) == 0, evaluation.output()[-3000:]
    report = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert report["environments"]["blackjack"]["probe"].keys() == {"exact_return", "agreement"}
    assert report["environments"]["down"]["mean_reward"] is None
