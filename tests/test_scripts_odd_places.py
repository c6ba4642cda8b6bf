"""The scripts where paths have spaces, folders were moved, and installations were broken off."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from bootstrap_script import load_bootstrap

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_bootstrap(monkeypatch)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_python_whose_path_has_spaces_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "my programs"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "find-python")],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHON": str(python)},
    )
    assert done.stdout.strip() == str(python)


@pytest.mark.soak
def test_copied_environment_is_made_anew(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "install", lambda python, profile: None)
    monkeypatch.setattr(bootstrap, "fingerprint", lambda name: str(bootstrap.ROOT))
    profile = bootstrap.PROFILES["test"]
    first = bootstrap.prepare("test", profile)
    (first / "old").touch()
    assert bootstrap.prepare("test", profile) == first
    assert (first / "old").exists()

    copy = tmp_path / "a copy"
    shutil.copytree(tmp_path / ".venvs", copy / ".venvs", symlinks=True)
    monkeypatch.setattr(bootstrap, "ROOT", copy)
    second = bootstrap.prepare("test", profile)
    assert copy in second.parents
    assert not (second / "old").exists()
    assert bootstrap.belongs(second)


def test_place_is_part_of_what_an_installation_depends_on(bootstrap: ModuleType, tmp_path: Path) -> None:
    prints = set()
    for name in ("one", "two"):
        bootstrap.ROOT = tmp_path / name
        bootstrap.ROOT.mkdir()
        (bootstrap.ROOT / "pyproject.toml").touch()
        (bootstrap.ROOT / "constraints").mkdir()
        (bootstrap.ROOT / "constraints" / "test.txt").touch()
        prints.add(bootstrap.fingerprint("test"))
    assert len(prints) == 2


@pytest.mark.slow
@pytest.mark.own_process
def test_broken_off_installation_leaves_no_pip_at_work(bootstrap: ModuleType, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()));"
        "print('Collecting', flush=True); time.sleep(60)"
    )

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)  # to this process alone, as `kill -INT` does

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        bootstrap.run_pip([sys.executable, "-c", code])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_only_the_first_pair_of_dashes_is_ours(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "prepare", lambda name, profile: tmp_path)
    monkeypatch.setattr(os, "execvp", lambda file, words: commands.append(words))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("VIRTUAL_ENV", "")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "test", "--", "pytest", "--", "-k"])
    bootstrap.main()
    assert commands == [["pytest", "--", "-k"]]
