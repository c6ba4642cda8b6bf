"""`ropewalk rollouts`: choosing the run, writing the page, and errors."""

import argparse
import os
import sys
from pathlib import Path

import pytest
from module_run import finished

from rl_bridge.cli.rollouts import COMMAND
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep

ROOT = Path(__file__).parents[3]


def rollouts(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_intermixed_args(arguments))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "seven", conversation())
    (tmp_path / "link.html").symlink_to("seven.html")
    assert rollouts("seven", "--out", "link.html") == 0
    text = (tmp_path / "seven.html").read_text()
    assert text.count('"iteration":5') == 4
    assert "<title>seven" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "seven", "seven.html"]
    assert "link.html: 0.1 MB" in capsys.readouterr().out
    assert rollouts("seven") == 0
    assert (tmp_path / "seven" / "rollouts.html").read_text() == text


def test_an_evaluation_is_read_without_the_packages_of_training(tmp_path: Path) -> None:
    keep(tmp_path / "runs" / "seven", conversation())
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'psutil', 'rich', 'numpy')))\n"
        "from openenv_core.cli.main import main\n"
        "sys.exit(main(['rollouts', '--out', 'seven.html']))"
    )
    done = finished(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 1, "found none; name its folder, or start one by ropewalk train"),
        (("nowhere",), 1, "expected the folder of a run, there is no 'nowhere'"),
        (("empty",), 1, "records.groups=0"),
        (("seven", "--out", "taken/out.html"), 2, "cannot write 'taken/out.html': Not a directory"),
        (("seven", "--out", 300 * "x"), 2, "xxx': File name too long"),
        (("seven", "--out", "pipe"), 2, "expected --out with the name of a file, got 'pipe'"),
        (("seven", "--out", "empty"), 2, "expected --out with the name of a file, got 'empty'"),
    ],
)
def test_impossible_requests_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").touch()
    os.mkfifo(tmp_path / "pipe")
    keep(tmp_path / "seven", conversation())
    assert rollouts(*arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("ropewalk rollouts: ")
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "pipe", "seven", "taken"]
