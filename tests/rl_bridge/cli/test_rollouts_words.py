"""`ropewalk rollouts`: which run, what it writes, where it serves, and what it says where there is nothing."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from rl_bridge.cli.rollouts import COMMAND
from rl_bridge.records import writer as segments
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep, said, told

ROOT = Path(__file__).parents[3]


def rollouts(*words: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_intermixed_args(words))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "seven", conversation())
    assert rollouts("seven", "--out", "seven.html") == 0
    text = (tmp_path / "seven.html").read_text()
    assert text.count('"iteration":5') == 4
    assert "<title>seven" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seven", "seven.html"]
    assert "seven.html: 0.1 MB" in capsys.readouterr().out


def test_newest_run_is_meant_where_none_is_named(tmp_path: Path) -> None:
    for age, name in ((100, "older"), (50, "newer"), (0, "without")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "without":
            keep(tmp_path / "runs" / name, [told(said("ask", "answer"))])
            file = tmp_path / "runs" / name / "rollouts" / "000001.jsonl"
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
    assert rollouts("--out", "out.html") == 0
    assert "<title>newer" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((), 1, "found none; name its folder, or start one by ropewalk train"),
        (("nowhere",), 1, "expected the folder of a run, there is no 'nowhere'"),
        (("empty",), 1, "records.groups=0"),
        (("seven", "--port", "70000"), 2, "expected --port from 0 to 65535, got 70000"),
        (("seven", "--out", ""), 2, "expected --out with the name of a file, got the folder '.'"),
        (("seven", "--out", "empty"), 2, "expected --out with the name of a file, got the folder 'empty'"),
        (("seven", "--out", "taken/out.html"), 2, "cannot write 'taken/out.html': Not a directory"),
        (
            ("seven", "--out", "missing/out.html"),
            2,
            "cannot write 'missing/out.html': No such file or directory",
        ),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, told: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").touch()
    keep(tmp_path / "seven", conversation())
    assert rollouts(*words) == status
    error = capsys.readouterr().err
    assert error.startswith("ropewalk rollouts: ")
    assert told in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "seven", "taken"]


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [
        (
            PermissionError(13, "Permission denied", "000001.jsonl"),
            1,
            "cannot read '000001.jsonl': Permission",
        ),
        (KeyboardInterrupt(), None, ""),
    ],
)
def test_file_that_could_not_be_finished_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: BaseException,
    status: int | None,
    told: str,
) -> None:
    def stops(_: Path) -> Iterator[bytes]:
        yield b"{}\n"
        raise fault

    keep(tmp_path / "seven", conversation())
    monkeypatch.setattr(segments, "read_lines", stops)
    if status is None:
        with pytest.raises(KeyboardInterrupt):
            rollouts("seven", "--out", "out.html")
    else:
        assert rollouts("seven", "--out", "out.html") == status
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["seven"]


def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    keep(tmp_path / "seven", conversation())
    program = (
        "import argparse; from rl_bridge.cli.rollouts import COMMAND; p = argparse.ArgumentParser();"
        " COMMAND.configure(p); raise SystemExit(COMMAND.run(p.parse_args()))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "seven"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(
                r"(http://127\.0\.0\.1:\d+/[\w-]{20,}/) has the rollouts of seven, until Ctrl-C", line
            )
            assert found is not None, line
            assert httpx.get(found[1], trust_env=False, timeout=10).status_code == 200
            # A port that is taken is said to be.
            assert rollouts("seven", "--port", str(urlsplit(found[1]).port)) == 2
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
