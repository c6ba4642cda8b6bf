"""Mistakes in a run's model, environment and task are reported before anything heavy is loaded."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv_core.scaffold.making import make, make_task
from openenv_core.scaffold.names import names_of
from rl_bridge.config.loading import load_config
from rl_bridge.errors import ConfigError
from rl_bridge.rollout.preflight import run_preflight

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    make(names_of("pebble"), parent=folder)
    make_task(names_of("pebble"), folder)
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "path", [str(made), *sys.path])
    yield made
    for name in [name for name in sys.modules if name.startswith("pebble")]:
        del sys.modules[name]


def preflight_error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        run_preflight(load_config("pebble.yaml", overrides))
    return str(refused.value)


def test_valid_run_passes_and_leaves_no_file(folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    run_preflight(load_config("pebble.yaml"))
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("rollout.task=pebble_tsk:PebbleTask", "cannot import 'pebble_tsk'"),
        ("env.app=peble_env.server.app:app", "from the folder that contains 'peble_env'"),
    ],
)
def test_misspelled_names_are_reported(folder: Path, override: str, message: str) -> None:
    assert message in preflight_error(override)


def test_run_without_a_model_needs_a_task_that_makes_one() -> None:
    with pytest.raises(ConfigError) as refused:
        run_preflight(load_config(ROOT / "examples" / "grpo_reasoning" / "config.yaml"))
    assert str(refused.value) == (
        "model.path: expected a folder with a checkpoint in the Hugging Face layout, got none, and "
        "examples.grpo_reasoning.task:ReversalTask makes none; set model.path=FOLDER"
    )


@pytest.mark.parametrize(
    ("module", "right", "wrong", "message"),
    [
        (
            "wrong_task",
            "observation.lowest",
            "observation.lowst",
            ["messages() of the first observation", "in messages", "lowst"],
        ),
        ("wrong_class", "class ", "clas ", ["to import 'wrong_class' raised", "SyntaxError"]),
    ],
)
def test_mistakes_in_a_task_are_shown_by_their_line(
    folder: Path, module: str, right: str, wrong: str, message: list[str]
) -> None:
    # A module each: two of one size that are written within a second are one to Python's cache of bytecode.
    text = (folder / "pebble_task.py").read_text()
    (folder / f"{module}.py").write_text(text.replace(right, wrong, 1))
    sys.modules.pop(module, None)
    found = preflight_error(f"rollout.task={module}:PebbleTask")
    assert [words for words in message if words not in found] == []
    assert f"{module}.py" in found
    assert not [room for room in ("rl_bridge", "openenv_core") if f"{ROOT / room}" in found]


@pytest.mark.slow
def test_nothing_heavy_is_loaded_for_it(folder: Path) -> None:
    program = (
        "import argparse, sys; from rl_bridge.cli.train import COMMAND; p = argparse.ArgumentParser();"
        " COMMAND.configure(p); status = COMMAND.run(p.parse_args());"
        " print(status, [m for m in ('torch', 'vllm', 'monarch', 'transformers', 'fastapi') if m in sys.modules])"
    )
    words = ["--config", "pebble.yaml", "env.app=pebble_env.server.app:ap"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "2 []\n"
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
