"""docs/tutorials/train.md, done as it says: a game and its task are made, and a policy learns it."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import blocks, page
from module_run import run_module

from openenv_core.cli.main import main
from rl_bridge.config.loading import load_config

PAGE = page("docs/tutorials/train.md")
TIMEOUT_S = 600.0


def block(language: str) -> str:
    return "".join(blocks(PAGE, language))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "ropewalk init dice --package --task\n" in block("bash")
    assert main(["init", "dice", "--package", "--task"]) == 0
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("dice_env", "dice_task")]:
        del sys.modules[name]


def test_the_files_are_those_of_the_page_and_make_a_task(folder: Path) -> None:
    assert (folder / "dice_task.py").read_text() == block("python")
    assert (folder / "dice.yaml").read_text() == block("yaml")
    task: Any = importlib.import_module("dice_task").DiceTask(load_config(folder / "dice.yaml"), folder)
    game = importlib.import_module("dice_env.server.environment").DiceEnvironment()
    assert task.messages(game.reset(seed=1)) == [{"role": "user", "content": "Guess a number from 1 to 10"}]
    assert game.step(task.parse(" 5\n")).hint in ("higher", "lower", "found")
    assert [task.parse(text) for text in ("five", "", "-1", "5.0")] == [None] * 4
    with pytest.raises(ValueError, match="less than or equal to 10"):
        task.parse("11")


def test_a_task_is_added_to_a_game_and_nothing_is_written_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "dice", "--task"]) == 2
    assert "dice.yaml yet, it is there" in capsys.readouterr().err
    (folder / "dice.yaml").unlink()
    (folder / "dice_task.py").rename(folder / "mine.py")
    (folder / "dice_env" / "models.py").write_text("mine")
    assert main(["init", "dice", "--task"]) == 0
    assert "ropewalk train --config dice.yaml" in capsys.readouterr().out
    assert (folder / "dice_task.py").read_text() == (folder / "mine.py").read_text()
    assert (folder / "dice_env" / "models.py").read_text() == "mine"
    assert main(["init", "cards", "--template", "tools", "--task"]) == 2
    assert "environments of tools need no task" in capsys.readouterr().err
    assert not (folder / "cards_env").exists()


@pytest.mark.heavy
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("shorter", [("trainer.iterations=2",), pytest.param((), marks=pytest.mark.soak)])
def test_it_trains(folder: Path, capsys: pytest.CaptureFixture[str], shorter: tuple[str, ...]) -> None:
    """All that the page promises, but for what it has learned in the end, which takes its sixty iterations."""
    assert "ropewalk train --config dice.yaml --name dice\n" in block("bash")
    words = ("--config", "dice.yaml", "--name", "dice", *shorter)
    done = run_module("rl_bridge.train", *words, cwd=folder, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "500 held-out episodes: mean reward " in done.stdout
    assert "ropewalk rollouts runs/dice " in done.stdout
    run = folder / "runs" / "dice"
    report = json.loads((run / "report.json").read_text())
    assert sum(report["endings"].values()) == report["episodes"] == 500
    assert (run / "policy" / "model.safetensors").exists()
    assert "ropewalk eval dice_env --policy random --episodes 500 " in block("bash")
    assert main(["eval", "dice_env", "--policy", "random", "--episodes", "500"]) == 0
    chance = float(re.search(r"dice_env +500 +([+-][.\d]+)", capsys.readouterr().out)[1])
    if not shorter:
        # Guesses at random find 34%; whoever has learned to halve, all.
        assert report["mean_reward"] > max(0.5, chance)
