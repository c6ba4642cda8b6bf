"""The task of an environment in one file, made from its docstring and models."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import load_config, load_env_config
from rl_bridge.errors import ConfigError
from rl_bridge.rollout import SchemaTask
from rl_bridge.rollout.preflight import run_preflight
from tests.rl_bridge.planning.published_models import QWEN3_1_7B

FILE = '''\
from openenv_core import Action, Environment, Observation


class Guess(Action):
    number: int{more}


class Face(Observation):
    hint: str = ""
    left: int = 3


class Pips(Environment[Guess, Face]):
    """Guess the die."""

    def reset(self) -> Face:
        return Face(hint="1 to 6")

    def step(self, action: Guess) -> Face:
        return Face(terminated=True)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("pips", None)


def task(folder: Path, more: str = "") -> Any:
    (folder / "pips.py").write_text(FILE.format(more=more))
    return SchemaTask(load_env_config("pips.py"), folder)


def test_prompt_has_the_rules_the_schema_and_answers_of_its_form(folder: Path) -> None:
    made = task(folder)
    face = sys.modules["pips"].Face()
    rules, *examples, shown = made.messages(face)
    assert rules == {
        "role": "system",
        "content": 'Guess the die.\nAnswer with number and nothing else: {"type": "integer"}',
    }
    assert [each["role"] for each in examples] == ["user", "assistant"] * 2
    assert all(made.parse(each["content"]) for each in examples[1::2])
    assert shown == {"role": "user", "content": "hint: \nleft: 3"}
    assert made.parse(" 4\n") == made.parse('{"number": 4}') == sys.modules["pips"].Guess(number=4)
    assert [made.parse(text) for text in ("four", "", "4 or 5", '{"face": 4}', "[4]")] == [None] * 5


def test_an_action_of_several_fields_is_json(folder: Path) -> None:
    made = task(folder, "\n    loud: bool = False")
    assert (
        '"loud": {"default": false, "type": "boolean"}'
        in made.messages(sys.modules["pips"].Face())[0]["content"]
    )
    assert made.parse('{"number": 4, "loud": true}').loud
    assert made.parse("4") is None


def test_a_run_on_a_file_needs_a_model_and_no_configuration(folder: Path) -> None:
    task(folder)
    config = load_env_config("pips.py", ["trainer.iterations=3"])
    assert (config.name, config.trainer.iterations) == ("pips", 3)
    assert config.environment.app == f"{folder / 'pips.py'}:Pips"
    with pytest.raises(ConfigError, match=r"model\.path: expected a folder .* set model\.path=FOLDER"):
        run_preflight(config)
    (folder / "config.json").write_text(json.dumps(QWEN3_1_7B))  # all that is read before the heavy stack
    run_preflight(load_env_config("pips.py", [f"model.path={folder}"]))
    with pytest.raises(ConfigError, match=r"no folder or file at nowhere\.py"):
        load_env_config("nowhere.py")
    (folder / "run.yaml").write_text("env: {app: pips.py}\nrollout: {}\n")
    assert load_config("run.yaml").rollout.task == "rl_bridge.rollout.schema_task:SchemaTask"
