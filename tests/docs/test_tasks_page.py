"""docs/tasks.md, done as it says: an environment from a template, the page's task and file beside it, and training."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from module_run import run_module

from openenv_core.scaffold.making import make
from openenv_core.scaffold.names import names_of
from rl_bridge.config import Config
from rl_bridge.config.loading import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
TIMEOUT_S = 400.0


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make(names_of("dice"), parent=tmp_path)
    (tmp_path / "dice_task.py").write_text(block("python"))
    (tmp_path / "dice.yaml").write_text(block("yaml"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("dice_env", "dice_task")]:
        del sys.modules[name]


def config_of(folder: Path) -> Config:
    return load_config(folder / "dice.yaml", [f"model.path={folder}"])


def test_the_example_is_a_task(folder: Path) -> None:
    task: Any = importlib.import_module("dice_task").DiceTask(config_of(folder), folder)
    game = importlib.import_module("dice_env.server.environment").DiceEnvironment()
    first = game.reset(seed=1)
    (message,) = task.messages(first)
    assert message["role"] == "user"
    assert message["content"].startswith(first.text)
    assert game.step(task.parse(" 50\n")).hint in ("higher", "lower", "found")
    assert [task.parse(text) for text in ("fifty", "", "-1", "5.0")] == [None] * 4
    with pytest.raises(ValueError, match="less than or equal to 100"):
        task.parse("101")


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_it_trains(folder: Path) -> None:
    from examples.sft.tiny_policy import make_tool_policy
    from rl_bridge.data.traces import Trace

    said = importlib.import_module("dice_env.server.environment").DiceEnvironment().reset(seed=1).text
    read = Trace(tools=(), messages=({"role": "user", "content": said},), reward=1.0)
    policy = make_tool_policy(folder / "policy", [read], seed=1, width=64, layers=1)
    small = ["rollout.batch_size=8", "rollout.group_size=4", "trainer.iterations=1", "evaluation.episodes=8"]
    words = ["--config", "dice.yaml", "--name", "one", f"model.path={policy}", *small]
    done = run_module("rl_bridge.train", *words, cwd=folder, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "8 held-out episodes: mean reward " in done.stdout
    run = folder / "runs" / "one"
    report = json.loads((run / "report.json").read_text())
    assert report["episodes"] == sum(report["endings"].values()) == 8
    assert (run / "policy" / "model.safetensors").exists()
