"""An environment in one file, through the commands that take it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from docker_engine import engine
from missing import require
from serve_process import eventually, serve
from terminal_process import in_terminal

from openenv_core import ClientError, GenericEnvClient, make
from openenv_core.providers.docker import DockerEngine

__all__ = ["engine"]

DICE: Final = '''\
# dice.py
from openenv_core import Action, Environment, Observation

class Guess(Action):
    number: int

class Face(Observation):
    hint: str = ""

class Dice(Environment[Guess, Face]):
    """Guess the die."""

    def reset(self) -> Face:
        self.secret = self.rng.randint(1, 6)
        return Face(hint="1 to 6")

    def step(self, action: Guess) -> Face:
        won = action.number == self.secret
        return Face(hint=f"it was {self.secret}", reward=float(won), terminated=True)
'''

PLAYING: Final = """
from dice import Face, Guess
from openenv_core import ExecutionError, make

with make("dice.py") as env:
    assert env.reset(seed=1).observation == Face(hint="1 to 6")
    assert env.state().seed == 1
    result = env.step(Guess(number=2))
    assert (result.reward, result.done, result.terminated) == (1.0, True, True)
    assert env.state().step_count == 1
    for call in (lambda: env.step(Guess(number=2)), lambda: env.reset(sides=20)):
        try:
            call()
        except ExecutionError as error:
            print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dice.py").write_text(DICE)
    return tmp_path


def run(folder: Path, *command: str, status: int = 0, timeout_s: float = 120) -> str:
    """Run a program in the folder, and return its output."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_takes_the_file_strictly(folder: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder), "--config-file", ""]
    done = subprocess.run(
        [*command, str(folder / "dice.py")], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout


def test_make_has_the_models_of_the_class(folder: Path) -> None:
    (folder / "playing.py").write_text(PLAYING)
    said = run(folder, sys.executable, "playing.py").splitlines()
    assert "reset() after the end of an episode" in said[0]
    assert "no reset options but seed and episode_id, got sides" in said[1]


def test_play_and_eval_take_the_file(folder: Path) -> None:
    lines = run(
        folder, "ropewalk", "play", "dice.py", "--seed", "1", "--action", '{"number": 2}', "--json"
    ).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["reset", "step", "episode"]
    assert json.loads(lines[1])["reward"] == 1.0
    report = run(folder, "ropewalk", "eval", "dice.py", "--policy", "random", "--episodes", "30", "--json")
    figures = json.loads(report[report.index("{") : report.rindex("}") + 1])["environments"]["dice.py"]
    assert figures["episodes"] == 30


def test_of_several_environments_in_a_file_the_user_names_one(folder: Path) -> None:
    (folder / "games.py").write_text(
        DICE + "\n\nclass Coin(Dice):\n    pass\n\n\nclass Card(Dice):\n    pass\n"
    )
    said = run(folder, "ropewalk", "play", "games.py", "--random", "1", status=2)
    assert "there are 2 environments in games.py; name one: games.py:Coin or games.py:Card" in said
    assert "it was" in run(folder, "ropewalk", "play", "games.py:Coin", "--random", "1")


def test_mcp_offers_the_actions_as_tools(folder: Path) -> None:
    require("mcp")

    def call(number: int, method: str, **params: object) -> str:
        return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})

    client = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    }
    lines = [
        call(1, "initialize", **client),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        call(2, "tools/list"),
        *(
            call(3 + at, "tools/call", name=name, arguments=arguments)
            for at, (name, arguments) in enumerate(
                [
                    ("guess", {"number": "six"}),
                    ("guess", {"number": 2}),
                    ("guess", {"number": 2}),
                    ("new_episode", {"sides": 20}),
                    ("new_episode", {"seed": 1}),
                ]
            )
        ),
    ]
    process = subprocess.Popen(
        ["ropewalk", "mcp", "dice.py", "--seed", "1"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answers = []
    with process:
        for line in lines:  # one after another: calls of a session may be answered in any order
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if '"id"' in line:
                answers.append(json.loads(process.stdout.readline())["result"])
        process.stdin.close()
    listed = {tool["name"]: tool["inputSchema"]["properties"] for tool in answers[1]["tools"]}
    assert listed["guess"] == {"number": {"title": "Number", "type": "integer"}}
    assert set(listed["new_episode"]) == {"seed", "episode_id"}
    wrong, won, late, unknown, again = answers[2:]
    assert "valid integer" in wrong["content"][0]["text"]
    assert won["structuredContent"] == {"done": True, "reward": 1.0, "hint": "it was 2"}
    assert "end of an episode" in late["content"][0]["text"]
    assert "got sides" in unknown["content"][0]["text"]
    assert again["structuredContent"]["hint"] == "1 to 6"


def test_serve_takes_the_file_with_a_page_and_reloads_it(folder: Path) -> None:
    with serve("--web", "--reload", app="dice.py", cwd=folder) as server:
        client = GenericEnvClient(f"http://{server.address}")
        with client.sync() as env:
            _, info = env.reset(seed=1)
            assert info == {}
            observation, reward, terminated, truncated, info = env.step({"number": 2})
            assert (observation["hint"], reward, terminated, truncated, info) == (
                "it was 2",
                1.0,
                True,
                False,
                {},
            )
        status, schema = server.get("/schema")
        assert (status, schema["action"]["title"], schema["state"]["title"]) == (200, "Guess", "State")
        (folder / "dice.py").write_text(DICE.replace("1 to 6", "one to six"))

        def again() -> bool:
            try:
                with GenericEnvClient(f"http://{server.address}").sync() as env:
                    return bool(env.reset().observation["hint"] == "one to six")
            except ClientError:  # the server before is about to end
                return False

        eventually(again)


def test_a_person_is_asked_which_of_several_environments(folder: Path) -> None:
    (folder / "games.py").write_text(
        DICE + "\n\nclass Coin(Dice):\n    pass\n\n\nclass Card(Dice):\n    pass\n"
    )
    with in_terminal("play", "games.py", "--random", "1", cwd=str(folder)) as terminal:
        terminal.until("Which environment of games.py? Coin, Card:")
        terminal.type("Card")
        terminal.until("it was")


def test_validate_takes_the_file_and_what_its_header_declares(folder: Path) -> None:
    header = "# /// script\n# dependencies = {}\n#\n# [tool.ropewalk.validation.reward]\n# range = [0, {}]\n# ///\n"
    levels = ["--level", "static", "--level", "runtime", "--json"]

    def checked(dependencies: str, highest: float, status: int) -> dict[str, str]:
        text = header.format(dependencies, highest) + DICE.replace("# dice.py", "import psutil")
        (folder / "dice.py").write_text(text)
        output = run(folder, "ropewalk", "validate", "dice.py", *levels, status=status)
        return {each["check"]: each["status"] for each in json.loads(output)["results"]}

    good = checked('["psutil"]', 1.0, 0)
    assert set(good.values()) == {"passed", "skipped"}
    assert (good["imports_declared"], good["rewards_valid"]) == ("passed", "passed")
    bad = checked("[]", 0.5, 1)
    assert bad["imports_declared"] == "failed"


@pytest.mark.docker
@pytest.mark.soak
def test_build_makes_an_image_of_the_file_and_push_finds_it(engine: DockerEngine, folder: Path) -> None:
    (folder / "dice_of_test.py").write_text('# /// script\n# dependencies = ["iniconfig"]\n# ///\n' + DICE)
    image = "dice-of-test-env:latest"
    try:
        assert image in run(folder, "ropewalk", "build", "dice_of_test.py", timeout_s=600)
        with make(image) as env:
            assert env.reset(seed=1).observation["hint"] == "1 to 6"
        inside = ["docker", "run", "--rm", image, "/opt/ropewalk/bin/python", "-c", "import iniconfig"]
        run(folder, *inside)
        said = run(folder, "ropewalk", "push", "dice_of_test.py", "--registry", "localhost:9/team", status=1)
        assert f"{image} -> localhost:9/team/{image}" in said
    finally:
        subprocess.run(
            ["docker", "image", "rm", "--force", image], capture_output=True, timeout=60, check=False
        )


def test_a_space_of_the_file_has_what_it_needs(folder: Path) -> None:
    said = run(folder, "ropewalk", "push", "dice.py", "--space", "me/dice", "--dry-run")
    for name in ("dice.py", "Dockerfile", "README.md", "openenv.yaml"):
        assert f"  {name}\n" in said
    (folder / "helper.py").write_text("")
    (folder / "dice.py").write_text(DICE.replace("# dice.py", "import helper"))
    said = run(folder, "ropewalk", "push", "dice.py", "--space", "me/dice", "--dry-run", status=2)
    assert "imports helper next to it" in said
