"""The scripts of the first screen, as far as they go without installing anything."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bootstrap_script import load_bootstrap

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_bootstrap(monkeypatch)


@pytest.mark.parametrize("script", ["train-blackjack", "test"])
def test_help_comes_at_once_with_examples(script: str) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / script), "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.startswith(f"usage: ./scripts/{script}")
    assert "examples:" in done.stdout


def test_python_that_is_too_old_or_missing_is_told_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "find-python")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHON": str(tmp_path / "no-python")},
    )
    assert done.returncode == 1
    assert "expected Python 3.11 or newer" in done.stderr


def test_profiles_name_extras_and_pins_that_exist(bootstrap: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for profile in bootstrap.PROFILES.values():
        if profile.extras is not None:
            assert set(profile.extras.split(",")) <= set(project["optional-dependencies"])
        assert (ROOT / "constraints" / profile.constraints).is_file()


def test_pins_name_no_place() -> None:
    for file in (ROOT / "constraints").glob("*.txt"):
        pins = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert pins
        for pin in pins:
            assert pin.count("==") == 1, f"{file.name}: {pin}"
            assert "/" not in pin, f"{file.name}: {pin}"


@pytest.mark.soak
def test_ready_environment_is_not_installed_into_again(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "fingerprint", lambda name: f"as {name} wants it")
    monkeypatch.setattr(bootstrap, "install", lambda python, profile: calls.append(profile.extras))
    profile = bootstrap.PROFILES["test"]
    first = bootstrap.prepare("test", profile)
    assert (first / "bin" / "python").is_file()
    assert bootstrap.prepare("test", profile) == first
    assert len(calls) == 1
    monkeypatch.setattr(bootstrap, "fingerprint", lambda name: "something has changed")
    bootstrap.prepare("test", profile)
    assert len(calls) == 2


@pytest.mark.soak
def test_failed_installation_is_not_taken_for_a_ready_one(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "fingerprint", lambda name: "x")

    def fails(python: Path, profile: object) -> None:
        bootstrap.run_pip([sys.executable, "-c", "print('no such package'); raise SystemExit(3)"])

    monkeypatch.setattr(bootstrap, "install", fails)
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip failed with status 3"):
            bootstrap.prepare("test", bootstrap.PROFILES["test"])
