"""What `ropewalk train` makes of its words, before anything heavy is loaded."""

import argparse
from pathlib import Path

import pytest

from openenv_core.cli.main import main
from rl_bridge.cli.train import COMMAND, _prepare
from rl_bridge.config import CONFIG_FILE, save_config
from rl_bridge.errors import ConfigError

TEXT = "env: {app: 'a:b'}\nrollout: {task: 'c:D'}\n"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(TEXT)
    return file


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_intermixed_args(words)


def resumable(tmp_path: Path, config_file: Path) -> str:
    config, folder = _prepare(parse("--config", str(config_file), "--name", "one", "seed=3"))
    folder.mkdir(parents=True)
    save_config(config, folder)
    assert (folder / CONFIG_FILE).is_file()
    return str(folder)


def test_options_and_overrides_stand_in_any_order(config_file: Path) -> None:
    arguments = parse("a.b=1", "--config", str(config_file), "c=2", "--seed", "4", "d=3")
    assert (arguments.overrides, arguments.seed) == (["a.b=1", "c=2", "d=3"], 4)


def test_the_command_itself_takes_them_in_any_order(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "trainer.iterations=0",
        "--config",
        str(config_file),
        "rollout.batch_size=0",
        "--seed",
        "1",
    ]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "trainer.iterations" in told
    assert "rollout.batch_size" in told


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/b", "a b", ".", "..", "-", ""])
def test_a_name_never_leads_out_of_the_output_folder(config_file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected --name"):
        _prepare(parse("--config", str(config_file), f"--name={name}"))


def test_resumed_run_takes_what_may_change(tmp_path: Path, config_file: Path) -> None:
    folder = resumable(tmp_path, config_file)
    config, _ = _prepare(parse("--resume", folder, "trainer.iterations=7", "--seed", "3"))
    assert (config.trainer.iterations, config.seed) == (7, 3)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--seed", "4"), "seed"),
        (("model.path=/other",), "model.path"),
        (("rollout.task=c:E",), "rollout.task"),
        (("--name", "two"), "--name"),
    ],
)
def test_resumed_run_stays_the_run_that_it_was(
    tmp_path: Path, config_file: Path, words: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"expected {key}"):
        _prepare(parse("--resume", resumable(tmp_path, config_file), *words))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("env.reset={seed: 1}", "env.reset without a seed"),
        ("trainer.updates_per_iteration=1000", "at most rollout.batch_size"),
        ("rollout.temperature=0.001", "rollout.temperature"),
    ],
)
def test_settings_that_cannot_mean_what_they_say_are_refused(config_file: Path, word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _prepare(parse("--config", str(config_file), word))
