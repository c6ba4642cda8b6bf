"""Our packages are found although the working directory has folders of their names."""

import os
import sys
from pathlib import Path

import pytest
from module_run import finished
from serve_process import WAIT_TIMEOUT_S, serve

APP = "async def app(scope, receive, send): ...\n"
FOREIGN = "raise RuntimeError('this folder is not Ropewalk')\n"
LAYOUTS = {
    "empty": {"envs/notes.txt": ""},
    "upstream": {
        "envs/echo_env/__init__.py": "",
        "envs/echo_env/openenv.yaml": "spec_version: 1\nname: echo\napp: server.app:app\nport: 8000\n",
        "envs/echo_env/server/__init__.py": "",
        "envs/echo_env/server/app.py": APP,
    },
    "code": {
        f"{name}/__init__.py": FOREIGN for name in ("dockerfiles", "envs", "examples", "rl_bridge", "servers")
    },
    "folders": {f"{name}/notes.txt": "" for name in ("dockerfiles", "envs", "rl_bridge", "servers")},
}
COMMANDS = {
    "script": [str(Path(sys.executable).with_name("ropewalk"))],
    "module": [sys.executable, "-m", "openenv_core.cli"],
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(folder: Path, *command: str, path: str = "") -> str:
    environ = {**os.environ, "PYTHONPATH": path}
    done = finished(*command, cwd=folder, env=environ, timeout_s=WAIT_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("command", "path"), [("script", ""), ("script", "."), ("module", "")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_commands_list_our_environments(layout: str, command: str, path: str, tmp_path: Path) -> None:
    listed = run(write(tmp_path, LAYOUTS[layout]), *COMMANDS[command], "list", path=path)
    assert {line.split()[0] for line in listed.splitlines()} >= {"blackjack_env", "shop_env"}
    assert ("echo" in listed) == (layout == "upstream")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_server_and_client_of_a_name_are_ours(layout: str, tmp_path: Path) -> None:
    program = (
        "from openenv_core import make\n"
        "with make('blackjack') as env:\n"
        "    print(type(env.async_client).__name__, env.reset(seed=1).done)\n"
    )
    write(tmp_path, LAYOUTS[layout])
    assert run(tmp_path, sys.executable, "-c", program, path=".") == "BlackjackEnv False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "validate blackjack --level runtime",
        "eval blackjack --policy random --episodes 2 --out out",
        "play blackjack --seed 1 --random 1",
        "train --help",
        "init dice",
    ],
)
def test_commands_run_in_such_a_folder(arguments: str, tmp_path: Path) -> None:
    assert run(write(tmp_path, LAYOUTS["code"]), *COMMANDS["script"], *arguments.split(), path=".")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--workers", "2"), ("--reload",)])
def test_workers_and_reloaded_servers_are_ours(arguments: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, {**LAYOUTS["code"], "game.py": "from envs.blackjack_env.server.app import app\n"})
    (tmp_path / "envs" / "__init__.py").write_text("")
    with serve(*arguments, app="./game.py", cwd=tmp_path, PYTHONPATH=".") as server:
        assert "properties" in server.get("/schema")[1]["action"]


def test_users_package_of_the_name_keeps_its_code_and_modules(tmp_path: Path) -> None:
    files = {
        "envs/__init__.py": "OWN = 'own'\n",
        "envs/game_env/__init__.py": "",
        "envs/game_env/server/__init__.py": "",
        "envs/game_env/server/app.py": f"from envs import OWN\nfrom envs.shop_env import ShopEnv\n{APP}",
    }
    in_commands = (
        "from openenv_core.packages import prefer_ours\n"
        "prefer_ours()\n"
        "from servers.target import load_app\n"
        "apps = {load_app(text) for text in ('envs.game_env.server.app:app', 'game')}\n"
        "print(len(apps), load_app('./envs/game_env').__module__)\n"
    )
    in_programs = (
        "from openenv_core.making import client_class\n"
        "print(client_class('blackjack').__name__)\n"
        "from envs import OWN, game_env\n"
        "print(OWN)\n"
    )
    write(tmp_path, files)
    assert run(tmp_path, sys.executable, "-c", in_commands) == "1 game_env.server.app\n"
    assert run(tmp_path, sys.executable, "-c", in_programs) == "BlackjackEnv\nown\n"


def test_module_that_ours_hides_is_named(tmp_path: Path) -> None:
    app = f"from servers.dice import roll\n{APP}"
    write(tmp_path, {"servers/dice.py": "def roll(): ...\n", "game.py": app})
    command = [*COMMANDS["script"], "serve", "./game.py", "--port", "0"]
    done = finished(*command, cwd=tmp_path, timeout_s=WAIT_TIMEOUT_S)
    assert done.returncode == 2
    assert f"hides {tmp_path / 'servers'}: rename it" in done.stderr


def test_program_whose_module_has_the_whole_name_is_told(tmp_path: Path) -> None:
    program = (
        "import envs.blackjack_env\n"
        "from openenv_core.making import client_class\n"
        "try:\n"
        "    client_class('blackjack')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    write(tmp_path, {"envs/__init__.py": "", "envs/blackjack_env/__init__.py": ""})
    hidden = tmp_path / "envs" / "blackjack_env"
    assert run(tmp_path, sys.executable, "-c", program).startswith(f"{hidden} hides Ropewalk's package")
