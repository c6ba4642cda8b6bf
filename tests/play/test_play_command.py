"""`ropewalk play` as a process: in a pseudo-terminal, behind a pipe, unattended. Real servers."""

import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from counter import Add, Count, Diverging
from module_run import finished
from serve_process import SUPPORT, eventually, gone, serve
from serving import served
from terminal_process import WAIT_TIMEOUT_S, in_terminal

from openenv_core import GenericEnvClient
from openenv_core.cli.main import main
from openenv_core.play.game import Game, play_at_random
from openenv_core.play.terminal import Terminal
from servers import create_app


def play(*words: str, typed: str = "", **environ: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "openenv_core.cli", "play", *words)
    variables = {**os.environ, **environ}
    return finished(*command, input=typed, cwd=SUPPORT, env=variables, timeout_s=WAIT_TIMEOUT_S)


def events(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_person_plays_in_a_terminal() -> None:
    with in_terminal("play", "blackjack", "--seed", "7") as terminal:
        terminal.until(":help for commands")
        terminal.until("--- episode 1, seed 7")
        assert terminal.until("Hit or stand?").startswith("\nYou hold 9, 10 (19).")
        terminal.until("\naction (hit|stand): ")
        family = terminal.family
        assert len(family) == 3  # the command, the guard, the server
        terminal.type("fold")
        terminal.until("expected one of hit, stand, got 'fold'")
        terminal.until("\naction (hit|stand): ")
        terminal.type(":rest")
        terminal.until("did you mean :reset?")
        terminal.type(":reset 5")
        terminal.until("episode 1 was left after 0 steps: return 0")
        terminal.until("--- episode 2, seed 5")
        terminal.until("\naction (hit|stand): ")
        terminal.type("st")
        terminal.until("step 1   reward 1   return 1   done")
        terminal.until("episode 2 is over after 1 step: return 1")
        terminal.until("q to leave: ")
        terminal.type(":state")
        terminal.until('"seed": 5')
        terminal.until("q to leave: ")
        terminal.type("q")
        assert terminal.ended() == 0
        assert all(gone(process) for process in family)
        assert "Traceback" not in terminal.shown


@pytest.mark.slow
def test_two_people_play_at_a_table() -> None:
    with serve(app="kuhn") as server:
        words = ("play", f"http://{server.address}", "--table", "ours")
        with in_terminal(*words, "--seed", "3") as first, ExitStack() as stack:
            first.until("waiting for the other players ...")  # whoever comes first chooses the options
            second = stack.enter_context(in_terminal(*words, "--seat", "second"))
            second.until("waiting for the other players ...")
            first.until("You are the first player and hold J. Moves so far: none. Pass or bet?")
            first.until("\naction (pass|bet): ")
            assert "You are" not in second.shown
            first.type("bet")
            first.until("waiting for the other players ...")
            second.until("You are the second player and hold K. Moves so far: bet. Pass or bet?")
            second.until("\naction (pass|bet): ")
            second.type("bet")
            second.until("You win 2.")
            first.until("The other player holds K. You lose 2.")
            for terminal in (first, second):
                terminal.until("q to leave: ")
                terminal.type("q")
                assert terminal.ended() == 0


def test_a_person_takes_a_seat_against_the_server() -> None:
    done = play("kuhn", "--seat", "second", "--seed", "3", "--action", '{"action": "bet"}', "--json")
    assert done.returncode == 0, done.stderr
    first, *_ = events(done)
    assert first["options"] == {"seed": 3, "seat": "second"}
    assert first["observation"]["seat"] == "second"


def test_episode_without_a_score_has_no_return() -> None:
    sink = io.StringIO()
    with (
        served(create_app(Diverging, Add, Count)) as address,
        GenericEnvClient(f"http://{address}").sync() as client,
    ):
        game = Game(client, Terminal(io.StringIO(), sink, is_json=True))
        play_at_random(game, [{"amount": amount} for amount in (1, 0, 9, 10)], {})
    told = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [each["return"] for each in told if each["event"] == "step"] == [1, None, None, 1]
    assert [each["return"] for each in told if each["event"] == "episode"] == [None, 1]


@pytest.mark.slow
def test_lines_of_a_pipe_are_answers() -> None:
    answers = ["3", "fa", "y", "1.5", "1 2", '{"x": 1}', ""]  # one for each field, from steps to note
    answers += ['{"steps": 1, "note": "raise"}', ':reset {"far": 3}', '{"steps": 9}']
    done = play("playground:fields_app", "--json", typed="\n".join([*answers, ""]))
    first, step, error, left, second, last, episode = events(done)
    assert (first["event"], first["reward"], first["done"]) == ("reset", None, False)
    fields = {"kind": "move", "steps": 3, "speed": "fast", "loud": True, "weight": 1.5, "path": [1, 2]}
    assert step["action"] == {**fields, "place": {"x": 1}}
    assert step["observation"]["told"]["place"] == {"x": 1, "y": 0}
    assert (step["step"], step["reward"], step["return"]) == (1, 0.5, 0.5)
    assert (error["event"], error["type"]) == ("error", "ExecutionError")
    assert left == {"event": "episode", "episode": 1, "steps": 1, "return": 0.5, "done": False}
    assert second["options"] == {"far": 3}
    assert "far 3" in second["observation"]["text"]
    assert last["done"]
    assert episode == {"event": "episode", "episode": 2, "steps": 1, "return": 0.5, "done": True}
    assert done.returncode == 1  # for the error, which nobody saw
    where, raised = done.stderr.splitlines()[1], done.stderr.splitlines()[-1]
    assert "playground.py" in where
    assert raised == "RuntimeError: as it was told"


@pytest.mark.slow
def test_tools_are_those_of_the_episode() -> None:
    done = play("kits:app", "--json", typed=':reset {"kit": ["weld"]}\nweld\n\ndrive\n')
    found = events(done)
    tools = [[tool["name"] for tool in event["tools"]] for event in found if event["event"] == "tools"]
    assert tools == [["cut", "drive"], ["weld"], ["cut", "drive"]]
    assert [event["reward"] for event in found if event["event"] == "step"] == [1, 1]
    assert done.returncode == 0, done.stderr


def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (("blackjack", "--action", "hit"), "expected a JSON object"),
        (("blackjack", "--action", "{}", "--random", "3"), "both --action and --random are given"),
        (("blackjack", "--random", "0"), "--random"),
        (("blackjack", "--timeout", "soon"), "--timeout"),
        (
            ("blackjack", "--reset", '{"seed": "one"}', "--random", "1"),
            "seed: Input should be a valid integer",
        ),
        (("http://localhost:80a0",), "expected an OpenEnv server at ws://localhost:80a0/ws"),
    ):
        assert main(["play", *words]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("ctrl-c", 130, "episode 1 was left after 0 steps: return 0"),
        ("window closes", -9, ""),
        ("server dies", 2, "ropewalk: "),
    ],
)
def test_nothing_is_left_whatever_ends_the_game(how: str, status: int, words: str) -> None:
    with in_terminal("play", "blackjack", "--seed", "7") as terminal:
        terminal.until("\naction (hit|stand): ")
        family = terminal.family
        if how == "ctrl-c":
            terminal.interrupt()
        elif how == "window closes":
            terminal.process.kill()
        else:
            for process in family[1:]:
                process.kill()
            terminal.type("hit")
        assert terminal.ended() == status
        assert words in terminal.shown
        assert "Traceback" not in terminal.shown
        eventually(lambda: all(gone(process) for process in family))


@pytest.mark.soak
def test_ctrl_c_leaves_a_step_that_hangs() -> None:
    with in_terminal("play", "hanging:app", cwd=SUPPORT) as terminal:
        terminal.until("amount (integer): ")
        family = terminal.family
        terminal.type("1")
        terminal.until("1\n")  # a terminal forgets what is unread when Ctrl-C comes
        terminal.interrupt()
        assert terminal.ended() == 130
        assert all(gone(process) for process in family)


@pytest.mark.soak
def test_tools_are_listed_and_their_arguments_asked_for() -> None:
    with in_terminal("play", "playground:tools_app", cwd=SUPPORT) as terminal:
        terminal.until("add - Adds two numbers.\n")
        terminal.until("a (integer -9..9): one number")
        terminal.until("tool (add|greet): ")
        terminal.type("add")
        terminal.until("a (integer -9..9): ")
        terminal.type("ten")
        terminal.until("expected a whole number, got 'ten'")
        terminal.until("a (integer -9..9): ")
        terminal.type("2")
        terminal.until("b (integer -9..9 [1]): ")
        terminal.type("")
        terminal.until("result: 3")
        terminal.until("step 1   reward 3   return 3")
        terminal.type("gr")
        terminal.until("result: hello")
        terminal.until("tool (add|greet): ")
        terminal.type('{"type": "call_tool", "tool_name": "multiply"}')
        terminal.until("tool_not_found")
        terminal.until("tool (add|greet): ")
        terminal.type(":quit")
        assert terminal.ended() == 0
        assert "episode 1 was left after 3 steps: return 3" in terminal.shown


@pytest.mark.soak
def test_environment_text_cannot_control_the_terminal() -> None:
    with in_terminal("play", "playground:fields_app", cwd=SUPPORT) as terminal:
        terminal.until("\nsteps (integer 1..9): ")
        assert "\x1b]0;" not in terminal.raw
        assert "\x1b[2J" not in terminal.raw
        terminal.type(":quit")
        assert terminal.ended() == 0


@pytest.mark.soak
def test_the_same_seed_is_the_same_random_game() -> None:
    games = [play("blackjack", "--seed", "3", "--random", "12", "--json") for _ in range(2)]
    assert [game.returncode for game in games] == [0, 0], games[0].stderr
    assert games[0].stdout == games[1].stdout
    found = events(games[0])
    assert sum(event["event"] == "step" for event in found) == 12
    seeds = [event["options"]["seed"] for event in found if event["event"] == "reset"]
    assert seeds == list(range(3, 3 + len(seeds)))
    tools = play("playground:tools_app", "--seed", "1", "--random", "5", "--json")
    assert [event["event"] for event in events(tools)] == ["reset", *["step"] * 5, "episode"]


@pytest.mark.soak
def test_actions_are_played_in_their_order() -> None:
    hit, stand = '{"action": "hit"}', '{"action": "stand"}'
    done = play("blackjack", "--seed", "3", "--action", hit, "--action", stand)
    assert done.returncode == 0
    assert done.stdout.count("step ") == 2
    assert done.stdout.rstrip().splitlines()[-1].startswith("episode 1 is over after 2 steps: return ")
    done = play("blackjack", "--seed", "3", "--action", stand, "--action", stand)
    assert done.returncode == 2
    assert "its end before number 2" in done.stderr
    assert "episode 1 is over after 1 step" in done.stdout


@pytest.mark.soak
def test_server_that_runs_already_is_left_running() -> None:
    token = "correct-horse-battery-staple"
    with serve("--token", token, app="playground:fields_app") as server:
        url = f"http://{server.address}"
        refused = play(url, typed=":quit\n")
        assert refused.returncode == 2
        assert "token" in refused.stderr
        done = play(url, typed='{"steps": 9}\n\n', ROPEWALK_TOKEN=token)
        assert done.returncode == 0, done.stderr
        assert "episode 1 is over after 1 step: return 0.5" in done.stdout
        assert server.process.poll() is None


@pytest.mark.soak
def test_server_that_reloads_is_played_on(tmp_path: Path) -> None:
    source = tmp_path / "copied_playground.py"
    text = Path(SUPPORT, "playground.py").read_text()
    source.write_text(text.replace("DETERMINISTIC = True", ""))  # its episodes would be replayed
    with (
        serve("--reload", app=f"{source}:fields_app") as server,
        in_terminal("play", f"http://{server.address}") as terminal,
    ):
        terminal.until("\nsteps (integer 1..9): ")
        source.touch()
        eventually(lambda: "serving again" in server.output)
        terminal.type('{"steps": 1}')
        terminal.until("EpisodeLostError")
        terminal.until("episode 1 was left after 0 steps")
        terminal.until("q to leave: ")
        terminal.type("")
        terminal.until("--- episode 2")
        terminal.type(":quit")
        assert terminal.ended() == 0
