"""The page about several players: its blocks run."""

import shlex
from pathlib import Path

import pytest
from doc_pages import blocks, page, printed
from module_run import run_module

PAGE = page("docs/players.md")


def test_the_first_game_of_the_page_is_played() -> None:
    assert printed(blocks(PAGE, "python")[0]) == "1\n"


@pytest.mark.slow
def test_the_first_game_of_the_page_is_served_as_a_file(tmp_path: Path) -> None:
    code, _, _ = blocks(PAGE, "python")[0].partition("\ngame = ")
    (tmp_path / "rock.py").write_text(f"{code}\n")
    assert (
        run_module("openenv_core.cli", "init", "rock", "--task", cwd=tmp_path, timeout_s=100).returncode == 0
    )
    assert 'RULES = """\\\nRock\nAnswer with hand' in (tmp_path / "rock_task.py").read_text()
    words = ("play", "rock.py", "--seed", "3", "--action", '{"hand": "rock"}', "--json")
    done = run_module("openenv_core.cli", *words, cwd=tmp_path, timeout_s=100)
    assert '"done": true' in done.stdout, done.stderr
    assert printed(blocks(PAGE, "python")[-1], cwd=tmp_path) == "['left', 'right']\n-1 1\n"


@pytest.mark.slow
def test_a_seat_is_played_against_the_server_and_two_meet_at_a_table() -> None:
    _, alone, together, _ = blocks(PAGE, "python")
    assert "You are the second player" in printed(alone)
    assert printed(together) == "0\n"


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    (block,) = blocks(PAGE, "bash")
    play, evaluate = (
        run_module("openenv_core.cli", *shlex.split(line)[1:], cwd=tmp_path, timeout_s=100)
        for line in block.splitlines()
    )
    assert "You win 1." in play.stdout
    assert "kuhn as second: 20 of 20" in evaluate.stderr
