"""The arguments of `ropewalk train`, before anything heavy is loaded."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openenv_core.cli.main import main, run
from rl_bridge.cli.common import TOP_LEVEL, overrides_first_class
from rl_bridge.cli.train import COMMAND, _prepare
from rl_bridge.config import CONFIG_FILE, Config, save_config
from rl_bridge.errors import ConfigError
from rl_bridge.rollout import preflight
from tests.rl_bridge.config.sections import section_of

TEXT = "env: {app: 'a:b'}\nrollout: {task: 'c:D'}\n"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(TEXT)
    return file


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return parser.parse_intermixed_args(args)


def resumable(tmp_path: Path, config_file: Path) -> str:
    config, folder = _prepare(parse("--config", str(config_file), "--name", "one", "seed=3"))
    folder.mkdir(parents=True)
    save_config(config, folder)
    return str(folder)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--monarch.num_nodes", "8", "a.b=c"], ["monarch.num_nodes=8", "a.b=c"]),
        (["--a.b=c", "--a.b.c=d=e"], ["a.b=c", "a.b.c=d=e"]),
        (["--a.b", "-2", "--c.d", ""], ["a.b=-2", "c.d="]),
        (["--a.b", "--c.d=e", "--f.g", "--seed", "4"], ["a.b", "c.d=e", "f.g", "--seed", "4"]),
        (["--algorithm", "dapo", "--output_dir=x"], ["algorithm=dapo", "output_dir=x"]),
        (["--a.", "--.b", "--a..b", "--1.b", "-a.b"], ["--a.", "--.b", "--a..b", "--1.b", "-a.b"]),
        (["--", "--a.b", "c"], ["--", "--a.b", "c"]),
    ],
)
def test_options_with_dots_are_keys(args: list[str], expected: list[str]) -> None:
    assert overrides_first_class(args) == expected


def test_every_key_without_a_dot_can_be_an_option() -> None:
    keys = {name for name, field in Config.model_fields.items() if section_of(field.annotation) is None}
    options = set(vars(parse("--config", "f")))
    assert keys - options == {"deterministic", "output_dir"}
    assert {*TOP_LEVEL} == {*(keys - options), "algorithm"}


def test_the_command_takes_both_forms(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--trainer.iterations", "0", "--config", str(config_file), "seed=-1", "--rollout.batch_size=0"]
    assert main(["train", *args]) == run(COMMAND, args) == 2
    stderr = capsys.readouterr().err
    for key in ("trainer.iterations", "rollout.batch_size", "seed"):
        assert stderr.count(f"\n  {key}: ") == 2


def test_a_key_that_does_nothing_is_told_and_trained_with(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = SimpleNamespace(train_run=lambda config, folder, *, resume: 0)
    monkeypatch.setitem(sys.modules, "rl_bridge.loops.session", trains)
    monkeypatch.setattr(preflight, "run_preflight", lambda config: None)
    args = ["--config", str(config_file), "algorithm.kl_estimator=k1"]
    assert run(COMMAND, args) == 0
    warning = "ropewalk train: warning: algorithm.kl_estimator=k1 has no effect: "
    assert capsys.readouterr().err.startswith(warning)
    assert run(COMMAND, [*args, "algorithm.kl_coef=0.1"]) == 0
    assert capsys.readouterr().err == ""
    assert run(COMMAND, [*args, "env=null"]) == 2
    assert "expected env.* " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", ""])
def test_a_name_never_leads_out_of_the_output_folder(config_file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected --name"):
        _prepare(parse("--config", str(config_file), f"--name={name}"))


def test_name_of_a_run_that_never_began_is_free(tmp_path: Path, config_file: Path) -> None:
    args = ("--config", str(config_file), "--name", "one")
    _, folder = _prepare(parse(*args))
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()
    assert _prepare(parse(*args))[1] == folder
    (folder / CONFIG_FILE).touch()
    with pytest.raises(ConfigError, match="expected a new folder"):
        _prepare(parse(*args))


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (("--seed", "4"), "seed"),
        (("model.path=/other",), "model.path"),
        (("algorithm=ppo",), "algorithm.advantage"),
        (("--name", "two"), "--name"),
    ],
)
def test_resumed_run_stays_the_run_that_it_was(
    tmp_path: Path, config_file: Path, args: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"expected {key}"):
        _prepare(parse("--resume", resumable(tmp_path, config_file), *args))


def test_run_of_an_earlier_version_goes_on(tmp_path: Path, config_file: Path) -> None:
    folder = Path(resumable(tmp_path, config_file))
    saved = (folder / CONFIG_FILE).read_text()
    (folder / CONFIG_FILE).write_text(saved.replace("rollout:\n", "rollout:\n  fork_turn: null\n"))
    config, _ = _prepare(parse("--resume", str(folder)))
    assert config.seed == 3


def test_resumed_run_keeps_its_datasets_order_and_may_find_the_file_elsewhere(
    tmp_path: Path, config_file: Path
) -> None:
    config_file.write_text(
        "data: {source: a.jsonl}\nrollout: {}\nreward: {function: a.b}\nmodel: {path: /a}\n"
    )
    folder = resumable(tmp_path, config_file)
    config, _ = _prepare(parse("--resume", folder, "data.source=/elsewhere/a.jsonl"))
    assert config.data is not None
    assert config.data.source == "/elsewhere/a.jsonl"
    with pytest.raises(ConfigError, match=r"expected data\.sampling .*uniform.*sequential"):
        _prepare(parse("--resume", folder, "data.sampling=sequential"))
