"""`ropewalk serve --reload` with real files that change and real sockets that stay open."""

import http.client
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_process import WAIT_TIMEOUT_S, ServeProcess, eventually, gone, serve
from terminal_process import in_terminal

from openenv_core import CapacityError, ConfigurationError, GenericEnvClient
from openenv_core.cli.main import main
from servers.environments import source_of
from servers.reload import _is_source

APP = '''
import os
import subprocess
import time

from openenv_core import Action, Environment, Observation, State
from servers import create_app


class Tick(Action):
    then: str = ""


class Clock(Environment[Tick, Observation, State]):
    """one"""

    def reset(self, *, seed=None, episode_id=None):
        return Observation()

    def step(self, action):
        if action.then == "hang":
            print("hanging now", flush=True)
            time.sleep(3600)
        if action.then == "die":
            os._exit(7)
        if action.then == "start":
            subprocess.Popen(["sleep", "3600"])
        return Observation()

    @property
    def state(self):
        return State()


app = create_app(Clock, Tick, Observation, env_name="clock")
'''

LOOPS = "print('loading now', flush=True)\nwhile True:\n    pass\n"
ONE, TWO = '"""one"""', '"""two"""'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    env_folder = tmp_path / "clock_env"
    (env_folder / "server").mkdir(parents=True)
    (env_folder / "openenv.yaml").write_text("spec_version: 1\nname: clock_env\n")
    (env_folder / "server" / "__init__.py").touch()
    (env_folder / "__init__.py").touch()
    (env_folder / "server" / "app.py").write_text(APP)
    return env_folder


def description(server: ServeProcess) -> str:
    status, body = server.get("/metadata")
    assert status == 200
    return str(body["description"])


def serves(server: ServeProcess) -> bool:
    try:
        return server.get("/metadata")[0] == 200
    except (http.client.HTTPException, OSError):  # it met the one that was ended
        return False


def edit(folder: Path, change: Callable[[str], str]) -> None:
    app = folder / "server" / "app.py"
    app.write_text(change(app.read_text()))


@pytest.mark.slow
def test_changed_source_is_served_and_no_request_refused(folder: Path, tmp_path: Path) -> None:
    with serve("--reload", app=str(folder), PYTHONDONTWRITEBYTECODE="") as server:
        assert description(server) == "one"
        family = server.family
        descriptions: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                try:
                    descriptions.append(description(server))
                except ConnectionRefusedError:
                    descriptions.append("refused")
                except (http.client.HTTPException, OSError):  # it met the server that was ended
                    pass

        asking = threading.Thread(target=ask)
        asking.start()
        # Of the same length, and in the same second as far as can be told: what was compiled of the file looks new.
        written = (folder / "server" / "app.py").stat()
        changed = tmp_path / "changed"
        changed.write_text(APP.replace(ONE, TWO))
        os.utime(changed, ns=(written.st_atime_ns, written.st_mtime_ns))
        changed.replace(folder / "server" / "app.py")
        try:
            eventually(lambda: "two" in descriptions)
        finally:
            stop.set()
            asking.join(WAIT_TIMEOUT_S)
        assert set(descriptions) <= {"one", "two"}
        assert "server/app.py changed" in server.output

        edit(folder, lambda text: text.replace("class Tick(Action)", "class Tick(Action"))
        eventually(lambda: "waiting for the next change" in server.output)
        assert "SyntaxError" in server.output
        assert "importlib" not in server.output
        url = f"http://{server.address}"
        with (
            pytest.raises(CapacityError, match="SyntaxError"),
            GenericEnvClient(url, queue_timeout_s=0).sync() as client,
        ):
            client.reset()
        edit(folder, lambda text: text.replace("class Tick(Action", "class Tick(Action)"))
        eventually(lambda: serves(server))
        family += server.family
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0
        assert all(gone(process) for process in family)


def test_only_source_files_trigger_a_reload(folder: Path) -> None:
    for name in ("models.py", "openenv.yaml", "server/deck.json", "data/words.yml"):
        assert _is_source(folder / name, folder), name
    for name in (
        ".git/x.py",
        ".venv/lib/x.py",
        "server/__pycache__/x.py",
        "tests/test_clock.py",
        "outputs/run.json",
        "clock_env.egg-info/x.json",
        ".#models.py",
        "README.md",
        "models.py~",
        "../elsewhere/x.py",
    ):
        assert not _is_source(Path(os.path.normpath(folder / name)), folder), name


def test_folder_of_the_target_is_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.chdir(folder)
    for target in (
        ".",
        "server/app.py",
        "server/app.py:app",
        "openenv.yaml",
        "clock_env.server.app:app",
        "clock",
        "clock-env",
        str(folder),
    ):
        assert source_of(target) == folder, target
    assert "clock_env" not in sys.modules  # it was found, not run
    root = Path(__file__).parents[2]
    assert source_of("envs.blackjack_env.server.app:app") == root / "envs" / "blackjack_env"
    assert source_of("blackjack") == root / "envs" / "blackjack_env"
    assert source_of("counter:app") == root / "tests" / "support"
    for nothing in ("no_such_env", "./no/such", "no.such.module:app", "clock_env.nothing:app"):
        with pytest.raises(ConfigurationError, match=nothing):
            source_of(nothing)


def test_missing_library_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    assert main(["serve", "counter:app", "--reload", "--port", "0"]) == 2
    assert "pip install 'ropewalk[author]'" in capsys.readouterr().err


@pytest.mark.soak
def test_server_ends_when_its_parent_is_killed(folder: Path) -> None:
    with serve("--reload", app=str(folder)) as server:
        status, _ = server.request("POST", "/step", {"action": {"then": "start"}})
        assert status == 200
        family = server.family
        assert len(family) == 4  # the supervisor, the guard, the server, and what its environment started
        server.process.kill()
        eventually(lambda: all(gone(process) for process in family))


@pytest.mark.soak
def test_ctrl_c_in_a_terminal_ends_all_processes(folder: Path) -> None:
    with in_terminal("serve", str(folder), "--reload", "--port", "0") as terminal:
        terminal.until(f"watching {folder}")
        eventually(lambda: len(terminal.family) == 3)
        family = terminal.family
        terminal.keys("\x03")
        assert terminal.ended() == 0
        assert all(gone(process) for process in family)
        assert "Traceback" not in terminal.shown


@pytest.mark.soak
def test_hanging_code_does_not_block_a_reload(folder: Path) -> None:
    with serve("--reload", app=str(folder)) as server, server.connect() as connection:
        body = b'{"action": {"then": "hang"}}'
        head = "POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: "hanging now" in server.output)
        edit(folder, lambda text: LOOPS + text)
        eventually(lambda: "loading now" in server.output)
        edit(folder, lambda text: text.removeprefix(LOOPS).replace(ONE, TWO))
        assert description(server) == "two"
        # Nor does code that ends its server.
        with pytest.raises((http.client.HTTPException, OSError)):
            server.request("POST", "/step", {"action": {"then": "die"}})
        eventually(lambda: "ended with status 7; waiting for the next change" in server.output)
        edit(folder, lambda text: text.replace(TWO, ONE))
        assert description(server) == "one"


@pytest.mark.soak
def test_failed_first_start_waits_and_extra_folders_are_watched(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    edit(folder, lambda text: "from said import said\n" + text.replace(ONE, TWO))
    with serve("--reload", "--reload-dir", str(shared), app=str(folder), PYTHONPATH=str(shared)) as server:
        status, refusal = server.get("/metadata")
        assert status == 503
        assert "No module named 'said'" in refusal["detail"]
        (shared / "said.py").write_text("said = 1\n")
        eventually(lambda: serves(server))
        assert description(server) == "two"
        assert "said.py changed" in server.output
        assert "waiting for the next change" in server.output
