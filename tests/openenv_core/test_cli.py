import argparse
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from openenv_core.cli import Command
from openenv_core.cli import main as cli
from openenv_core.errors import OpenEnvError

SUPPORT = str(Path(__file__).parents[1] / "support")


def _fail(_: argparse.Namespace) -> int:
    raise OpenEnvError("expected this, got that")


def _interrupt(_: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def _make(name: str, run: Callable[[argparse.Namespace], int]) -> Command:
    return Command(
        name=name, help=f"try {name}", configure=lambda p: None, run=run, examples=(f"ropewalk {name}",)
    )


FINE = _make("fine", lambda _: 0)
FAILS = _make("fails", _fail)
STOPS = _make("stops", _interrupt)
NO_COMMAND = 3


@pytest.fixture(autouse=True)
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "fine": f"{__name__}:FINE",
        "fails": f"{__name__}:FAILS",
        "stops": f"{__name__}:STOPS",
        "odd": f"{__name__}:NO_COMMAND",
        "broken": "rl_bridge.no_such_module:COMMAND",
    }
    found = [EntryPoint(name, value, cli.GROUP) for name, value in values.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: found)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_help_lists_all_and_survives_the_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert "try fine" in text
    assert "broken      (not available: No module named" in text


def test_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fine"]) == 0
    with pytest.raises(SystemExit) as shown:
        cli.main(["fine", "--help"])
    assert shown.value.code == 0
    assert "examples:\n  ropewalk fine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["fails"], 2, "ropewalk: expected this, got that\n"),
        (["stops"], 130, ""),
        (["fin"], 2, "did you mean 'fine'?"),
        (["xyzzy"], 2, "there are: broken, fails, fine, odd, stops"),
        (["broken"], 2, "pip install 'ropewalk[rl]'"),
        (["odd"], 2, "got int"),
    ],
)
def test_what_goes_wrong(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == status
    assert text in capsys.readouterr().err


READ_BY_NOBODY = """
import sys
from openenv_core.cli import Command
from openenv_core.cli.main import run

def say(_):
    print("text")
    return 0

sys.exit(run(Command(name="x", help="", configure=lambda parser: None, run=say), []))
"""


def _without_a_reader(source: str) -> subprocess.CompletedProcess[str]:
    """Run it with an output that somebody has stopped to read."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as output:
        return subprocess.run(
            [sys.executable, "-c", source],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_output_that_nobody_reads_ends_quietly() -> None:
    ended = _without_a_reader(READ_BY_NOBODY)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_pipe_that_is_not_ours_is_no_reader_that_went() -> None:
    def of_another(_: argparse.Namespace) -> int:
        raise BrokenPipeError("a connection")

    command = Command(name="x", help="", configure=lambda parser: None, run=of_another)
    with pytest.raises(BrokenPipeError, match="a connection"):
        cli.run(command, [])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("ropewalk ")


@pytest.mark.slow
def test_serve_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "openenv_core.cli", "serve", "counter:app", "--port", "0"]
    with subprocess.Popen(command, cwd=SUPPORT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health") as reply:
                assert reply.read() == b'{"status":"healthy"}'
            server.terminate()
            server.wait(30)
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["counter:app", "--host", "192.0.2.1"], "choose a --host that this machine has"),
        (["counter:app", "--port", "99999"], "choose another --port"),
        (["counter:app", "--fd", "999"], "expected --fd to be an open socket"),
        (["nowhere:app"], 'Could not import module "nowhere"'),
        (["counter:ap"], 'Attribute "ap" not found in module "counter"'),
        (["counter"], "Give module:attribute"),
        (["counter:LIMIT"], "expected an ASGI app at 'counter:LIMIT', as create_app returns it, got int"),
        (["needy:app"], "No module named 'no_such_package'; install what it needs"),
    ],
)
def test_serve_says_what_is_wrong(words: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text("import no_such_package\n")
    command = [sys.executable, "-m", "openenv_core.cli", "serve", "--port", "0", *words]
    path = {**os.environ, "PYTHONPATH": SUPPORT}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_serve_shows_an_authors_mistake_and_nothing_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("app = 1 / 0\n")
    command = [sys.executable, "-m", "openenv_core.cli", "serve", "broken:app", "--port", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    files = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [str(tmp_path / "broken.py") in line for line in files] == [True]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_naming_the_commands_loads_no_web_framework() -> None:
    program = "import sys; from servers.cli.serve import COMMAND; assert 'fastapi' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
