"""`ropewalk list`: environments of folders, of the import path, of servers; whole ones and broken ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_process import serve

from openenv_core.cli.main import main


def make(folder: Path, **manifest: str) -> Path:
    """Make a folder of an environment, which is never imported."""
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


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["list", "--json", *words]) == 0
    return {one["target"]: one for one in json.loads(capsys.readouterr().out)}


def test_what_can_be_served_from_here_is_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "dice_env", version='"2.0"', description="Throws dice.  # not one more word")
    clone = make(here / "my-clone")
    (clone / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "3.1"\ndescription = "Cloned."\n')
    bare = make(here / "bare_env")
    (bare / "openenv.yaml").unlink()
    (bare / "__init__.py").write_text('"""Says\nlittle. The server is in :mod:`x`."""\n')
    make(here / "envs_of_mine" / "deep_env")
    make(here / ".hidden" / "no_env")
    found = listed(capsys)
    assert {"dice", "bare", "./my-clone", "./envs_of_mine/deep_env", "blackjack"} <= set(found)
    assert not [target for target in found if "hidden" in target]
    assert found["dice"] == {
        "name": "dice_env",
        "version": "2.0",
        "description": "Throws dice.",
        "where": str(here / "dice_env"),
        "target": "dice",
        "error": None,
    }
    clone_told, bare_told = found["./my-clone"], found["bare"]
    assert (clone_told["version"], clone_told["description"]) == ("3.1", "Cloned.")
    assert (bare_told["name"], bare_told["description"], bare_told["error"]) == (
        "bare_env",
        "Says little.",
        None,
    )
    assert found["blackjack"]["error"] is None


def test_a_broken_one_is_listed_with_what_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(here / "good")
    (make(here / "no_yaml") / "openenv.yaml").write_text("name: no_yaml\nversion: 1: 2\n\t- [\n")
    make(here / "unknown_key", verson="1")
    make(here / "elsewhere", app="somewhere.app:app")
    (make(here / "syntax") / "server" / "app.py").write_text("\ndef broken(:\n")
    (make(here / "not_text") / "openenv.yaml").write_bytes(b"name: \xff\xfe\n")
    (make(here / "zeros") / "server" / "app.py").write_bytes(b"\x00")
    errors = {target: one["error"] for target, one in listed(capsys, ".").items()}
    for name, said in {
        "no_yaml": "YAML",
        "unknown_key": "did you mean 'version'?",
        "elsewhere": "somewhere.app:app",
        "syntax": "server/app.py, line 2",
        "not_text": "openenv.yaml",
        "zeros": "server/app.py",
    }.items():
        assert said in errors.pop(f"./{name}"), name
    assert errors == {"./good": None}
    assert main(["list", "."]) == 0
    table = capsys.readouterr().out
    assert "\n  broken: server/app.py, line 2: invalid syntax\n" in table
    assert table.splitlines()[0].split() == ["NAME", "VERSION", "TARGET", "WHERE", "DESCRIPTION"]


def test_nothing_here_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "."]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "ropewalk init" in said.err
    assert main(["list", "nowhere"]) == 2
    assert "expected a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_is_asked(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "correct-horse-battery-staple"
    with serve("--token", token) as server:
        url = f"http://{server.address}"
        assert main(["list", url]) == 2
        assert "ROPEWALK_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("ROPEWALK_TOKEN", token)
        found = listed(capsys, f"ws://{server.address}/ws")
    assert found[url]["name"] == "counter"
    assert found[url]["description"] == "Counts up to a limit."
    assert main(["list", url]) == 2
    assert "no server answers at" in capsys.readouterr().err
