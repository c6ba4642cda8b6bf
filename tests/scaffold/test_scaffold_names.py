"""What an environment may be called, and how each place spells it."""

import sys
from pathlib import Path

import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.scaffold.names import LONGEST, Names, names_of


@pytest.mark.parametrize("text", ["rock_paper", "rock-paper", "rock_paper_env", "rock-paper-env"])
def test_all_ways_to_write_a_name_are_one_name(text: str) -> None:
    names = names_of(text)
    assert names == Names("rock_paper")
    assert (names.package, names.image, names.prefix, names.title) == (
        "rock_paper_env",
        "rock-paper-env",
        "RockPaper",
        "Rock Paper",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lower-case letters"),
        ("env", "beside the ending _env"),
        ("_env", "lower-case letters"),
        ("Dice", "try 'dice'"),
        ("RockPaper", "try 'rock_paper'"),
        ("RockPaperEnv", "try 'rock_paper'"),
        ("rock paper", "try 'rock_paper'"),
        ("rock__paper", "try 'rock_paper'"),
        ("rock.paper", "try 'rock_paper'"),
        ("../rock", "try 'rock'"),
        ("/tmp/rock", "lower-case letters"),
        ("_rock", "try 'rock'"),
        ("2048", "try 'game_2048'"),
        ("übung", "lower-case letters"),
        ("x" * (LONGEST + 1), f"at most {LONGEST}"),
        ("class", "keyword"),
        ("match-env", "keyword"),
        ("base", "base image"),
        ("openenv", "released package"),
        ("call_tool", "CallToolAction"),
        ("blackjack", "envs.blackjack_env"),
    ],
)
def test_names_that_nothing_can_be_called_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^expected .*, got .*; (try|choose) ") as refused:
        names_of(text)
    assert says in str(refused.value)


def test_what_is_suggested_can_be_used() -> None:
    for text in ("Dice", "rock paper", "2048", "../rock", "x" * 80, "A" * 80):
        with pytest.raises(ConfigurationError) as refused:
            names_of(text)
        assert names_of(str(refused.value).rpartition("try ")[2].strip("'"))


def test_a_name_that_an_installed_package_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "taken_env").mkdir(parents=True)
    (tmp_path / "site" / "taken_env" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigurationError, match="there is a package taken_env at"):
        names_of("taken")


def test_a_folder_in_the_working_directory_is_no_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there_env").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert names_of("there").package == "there_env"
