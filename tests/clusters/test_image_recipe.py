"""dockerfiles/rl/Dockerfile without an engine: what it takes from the repository is there and is not ignored."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "dockerfiles/rl/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
SENT = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
"""What the engine gets of the repository; the rest is ignored."""


def named(before: str) -> list[str]:
    (words,) = re.findall(rf"{re.escape(before)} ([\w ]+?)(?:;|$)", TEXT, re.MULTILINE)
    return str(words).split()


def test_everything_that_is_copied_is_sent_to_the_engine() -> None:
    copied = [word for line in re.findall(r"^COPY (.+)$", TEXT, re.MULTILINE) for word in line.split()[:-1]]
    assert len(copied) > 5
    for word in copied:
        assert (ROOT / word).exists(), word
        assert word == "." or Path(word).parts[0] in SENT, word
    assert all((ROOT / name).exists() for name in SENT)


def test_packages_that_stand_in_until_the_code_comes_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(named("for package in")) == sorted(pattern.removesuffix("*") for pattern in found)


def test_all_code_is_compiled_since_nobody_can_later() -> None:
    code = {name for name in SENT if (ROOT / name).is_dir() and any((ROOT / name).rglob("*.py"))}
    assert set(named("-m compileall -q")) == code - {"scripts", "dockerfiles"}


@pytest.mark.parametrize("secret", [".git", ".venvs", "runs", "tests", ".env"])
def test_nothing_else_is_sent(secret: str) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert not any(Path(name).parts[0] == secret for name in SENT)
