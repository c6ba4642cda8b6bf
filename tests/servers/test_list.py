"""`ropewalk list`: environments of folders and of the import path, working and broken."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from openenv_core.cli.main import main


def make(folder: Path, **manifest: str) -> Path:
    """Make the folder of an environment; it is never imported."""
    (folder / "server").mkdir(parents=True)
    lines = {"spec_version": "1", "name": folder.name, **manifest}
    (folder / "openenv.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    for file in ("__init__.py", "server/__init__.py"):
        (folder / file).touch()
    (folder / "server" / "app.py").write_text("raise AssertionError('listed, not run')\n")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def list_as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["list", "--json", *words]) == 0
    return {one["target"]: one for one in json.loads(capsys.readouterr().out)}


def test_environments_of_folders_and_import_path_are_listed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(here / "dice_env", version='"2.0"', description="Throws dice.  # not one more word")
    clone = make(here / "my-clone")
    (clone / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "3.1"\ndescription = "Cloned."\n')
    bare = make(here / "bare_env")
    (bare / "openenv.yaml").unlink()
    make(here / "envs_of_mine" / "deep_env")
    make(here / ".hidden" / "no_env")
    environments = list_as_json(capsys)
    assert {"dice", "bare", "./my-clone", "./envs_of_mine/deep_env", "blackjack"} <= set(environments)
    assert not [target for target in environments if "hidden" in target]
    assert environments["dice"] == {
        "name": "dice_env",
        "version": "2.0",
        "description": "Throws dice.",
        "where": str(here / "dice_env"),
        "target": "dice",
        "error": None,
    }
    clone_told, bare_told = environments["./my-clone"], environments["bare"]
    assert (clone_told["version"], clone_told["description"]) == ("3.1", "Cloned.")
    assert (bare_told["name"], bare_told["description"], bare_told["error"]) == (
        "bare_env",
        "",
        None,
    )
    assert environments["blackjack"]["error"] is None


def test_broken_environment_is_listed_with_its_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "good")
    (make(here / "no_yaml") / "openenv.yaml").write_text("name: no_yaml\nversion: 1: 2\n\t- [\n")
    make(here / "unknown_key", verson="1")
    make(here / "elsewhere", app="somewhere.app:app")
    (make(here / "syntax") / "server" / "app.py").write_text("\ndef broken(:\n")
    (make(here / "not_text") / "openenv.yaml").write_bytes(b"name: \xff\xfe\n")
    (make(here / "zeros") / "server" / "app.py").write_bytes(b"\x00")
    (make(here / "circle") / "server" / "link.py").symlink_to("link.py")
    errors = {target: one["error"] for target, one in list_as_json(capsys, ".").items()}
    for name, expected in {
        "no_yaml": "YAML",
        "unknown_key": "did you mean 'version'?",
        "elsewhere": "somewhere.app:app",
        "syntax": "server/app.py, line 2",
        "not_text": "openenv.yaml",
        "zeros": "server/app.py",
        "circle": "server/link.py: Too many levels of symbolic links",
    }.items():
        assert expected in errors.pop(f"./{name}"), name
    assert errors == {"./good": None}
    assert main(["list", "."]) == 0
    table = capsys.readouterr().out
    assert "\n  broken: server/app.py, line 2: invalid syntax\n" in table
    assert table.splitlines()[0].split() == ["NAME", "VERSION", "TARGET", "WHERE", "DESCRIPTION"]


def test_empty_list_suggests_init(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "."]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ropewalk init" in captured.err
    assert main(["list", "nowhere"]) == 2
    assert "expected a folder" in capsys.readouterr().err


def test_user_without_a_home_sees_absolute_folders(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(here / "inner" / "dice_env")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31)  # as in a container of a user whom it does not know
    assert main(["list", "../inner"]) == 0
    assert str(here / "inner" / "dice_env") in capsys.readouterr().out


def test_text_of_an_environment_cannot_control_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(here / "dice_env", description=r'"\e]0;title\aThrows\e[2J dice."', version=r'"\e[2J1"')
    assert main(["list", "."]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "dice_env",
        "1",
        "./dice_env",
        "./dice_env",
        "Throws",
        "dice.",
    ]


@pytest.mark.parametrize(
    ("columns", "header"),
    [
        (30, "TARGET DESCRIPTION"),
        (70, "NAME VERSION TARGET DESCRIPTION"),
        (100, "NAME VERSION TARGET WHERE DESCRIPTION"),
    ],
)
def test_narrow_terminal_shows_targets_and_descriptions(
    columns: int,
    header: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(
        here / "dice_env", description="Throws as many dice as the agent asks for, and adds up their numbers."
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["list", "."]) == 0
    first, line = capsys.readouterr().out.splitlines()
    assert first.split() == header.split()
    assert len(line) <= columns
    assert "./dice_env" in line
    assert "Throws as many" in line
