"""The command `ropewalk`: finding commands, errors and exit statuses, `serve`, proxies."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from forward_proxy import proxy_everything, recording_proxy

from openenv_core.checker.subject import Subject
from openenv_core.cli import Command
from openenv_core.cli import main as cli
from openenv_core.cli.play import _action_schema
from openenv_core.errors import OpenEnvError
from openenv_core.targets import target_of
from servers.cli.serve import COMMAND as SERVE


def _fail(_: argparse.Namespace) -> int:
    raise OpenEnvError("expected this, got \x1b[2Jthat")


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
    entry_points = [EntryPoint(name, value, cli.GROUP) for name, value in values.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: entry_points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_help_lists_all_commands_and_a_command_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert "try fine" in text
    assert "broken      (not available: No module named" in text
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith(" " * 14) for line in lines)  # what is wrong with the broken command
    assert cli.main(["fine"]) == 0
    for arguments, expected in (
        (["fine", "--help"], "examples:\n  ropewalk fine"),
        (["--version"], "ropewalk "),
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(arguments)
        assert exit_info.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["fails"], 2, "ropewalk: expected this, got that\n"),
        (["stops"], 130, ""),
        (["fin"], 2, "did you mean 'fine'?"),
        (["xyzzy"], 2, "there are: broken, fails, fine, odd, stops"),
        (["broken"], 2, "pip install 'ropewalk[rl]'"),
        (["odd"], 2, "got int"),
    ],
)
def test_failing_commands_report_a_message_and_status(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == status
    assert text in capsys.readouterr().err


SAYS_TEXT = """
import sys
from openenv_core.cli import Command
from openenv_core.cli.main import run

def say(_):
    print("text", sys.stdin.readline().rstrip(), "\\u2660 \\ud83d")
    return 0

sys.exit(run(Command(name="x", help="", configure=lambda parser: None, run=say), []))
"""


@pytest.mark.parametrize(
    ("full", "status", "expected"),
    [(False, 141, ""), (True, 2, "ropewalk: a disk is full: [Errno 28] No space left on device\n")],
)
def test_unwritable_output_prints_no_traceback(full: bool, status: int, expected: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as unread, Path("/dev/full").open("w") as of_full_disk:
        ended = subprocess.run(
            [sys.executable, "-c", SAYS_TEXT],
            stdin=subprocess.DEVNULL,
            stdout=of_full_disk if full else unread,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (status, expected)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii:strict", b"text \\xff \\u2660 \\ud83d\n"),
        ("utf-8:surrogateescape", "text \\xff ♠ \\ud83d\n".encode()),
    ],
)
def test_text_that_the_encoding_does_not_have_is_escaped(encoding: str, expected: bytes) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SAYS_TEXT],
        input=b"\xff\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, b"")


def test_closed_streams_are_empty() -> None:
    ended = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, SAYS_TEXT])
    assert ended.returncode == 0


def test_broken_pipe_of_the_command_itself_is_raised() -> None:
    def of_another(_: argparse.Namespace) -> int:
        raise BrokenPipeError("a connection")

    command = Command(name="x", help="", configure=lambda parser: None, run=of_another)
    with pytest.raises(BrokenPipeError, match="a connection"):
        cli.run(command, [])


# A socket that could not be bound is closed by the end of the process.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["counter:app", "--host", "192.0.2.1"], "choose a --host that this machine has"),
        (["counter:app", "--port", "99999"], "choose another --port"),
        (["nowhere:app"], 'Could not import module "nowhere"'),
    ],
)
def test_serve_reports_what_is_wrong(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(SERVE, ["--port", "0", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_serve_shows_only_the_authors_lines_of_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("app = 1 / 0\n")
    command = [sys.executable, "-m", "openenv_core.cli", "serve", "--port", "0", "broken:app"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    files = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert [str(tmp_path / "broken.py") in line for line in files] == [True]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


ANSWER = {"action": {"type": "object"}, "observation": {}, "name": "far"}


def check(url: str) -> None:
    assert Subject(target_of(url)).schema == ANSWER


def play(url: str) -> None:
    assert _action_schema(url, None) == ANSWER["action"]


@pytest.mark.parametrize("ask", [check, play])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_proxy_is_used_for_remote_hosts_only(
    ask: Callable[[str], None], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording_proxy(ANSWER) as (port, requested_urls):
        proxy_everything(monkeypatch, port, variable)
        ask("http://far.example")
        assert requested_urls
        assert all(one.startswith("http://far.example/") for one in requested_urls)
        requested_urls.clear()
        for host in ("127.0.0.1", "localhost"):
            ask(f"http://{host}:{port}")
        assert requested_urls
        assert all(one.startswith("/") for one in requested_urls)
