"""Parts of long benchmarks: what is kept, what is measured again, what a failure leaves, where folders come from."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.commandline import parser
from benchmarks.parts import FILES, PLAN, Parts, add_options, begun
from benchmarks.wire.figures import Figures

PLANNED = {"first": 1800.0, "second": 900.0, "third": 900.0}


class Scripted:
    """Measures parts of given names; those that are to fail do."""

    def __init__(
        self, folder: Path, *, failing: tuple[str, ...] = (), end: type[BaseException] = ValueError
    ) -> None:
        self.figures = Figures()
        self.said: list[str] = []
        self.measured: list[str] = []
        self._failing, self._end = failing, end
        self.parts = Parts(folder, PLANNED, self.figures, self.said.append)

    def run(self) -> list[bool]:
        return [self.parts.measure(name, self._part(name)) for name in PLANNED]

    def _part(self, name: str) -> Callable[[Path, Figures], None]:
        def measure(folder: Path, figures: Figures) -> None:
            assert not folder.exists()
            folder.mkdir()
            (folder / "left").touch()
            sys.stdout.write("under way\n")
            self.measured.append(name)
            figures.add("solved", "us", name, 1.0)
            if name in self._failing:
                raise self._end("something broke")
            figures.add("solved", "us", name, 2.0)

        return measure


def test_what_is_kept_is_not_measured_again(tmp_path: Path) -> None:
    once, again = Scripted(tmp_path), Scripted(tmp_path)
    assert once.run() == again.run() == [True] * 3
    assert (once.measured, again.measured) == (list(PLANNED), [])
    assert once.figures == again.figures
    assert once.figures.values["solved", "us", "second"] == [1.0, 2.0]


def test_a_part_that_fails_is_noted_and_measured_again_the_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Scripted(tmp_path, failing=("second",))
    assert failed.run() == [True, False, True]
    (note,) = failed.figures.notes
    assert note == f"second: ValueError: something broke ({tmp_path / 'second.log'})"
    assert ("solved", "us", "second") not in failed.figures.values  # half of it is nothing
    log = (tmp_path / "second.log").read_text()
    assert log.startswith("under way\nTraceback")
    assert capsys.readouterr().out == ""  # standard output is for the report
    again = Scripted(tmp_path)
    assert again.run() == [True] * 3
    assert (again.measured, again.figures.notes) == (["second"], [])


def test_an_interruption_ends_all_and_keeps_what_is_done(tmp_path: Path) -> None:
    interrupted = Scripted(tmp_path, failing=("second",), end=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    again = Scripted(tmp_path)
    assert again.run() == [True] * 3
    assert again.measured == ["second", "third"]


def test_it_says_how_long_the_rest_takes(tmp_path: Path) -> None:
    all_of_it = Scripted(tmp_path)
    all_of_it.run()
    assert [one.split(", ")[0] for one in all_of_it.said] == [
        "first: part 1 of 3", "second: part 2 of 3", "third: part 3 of 3",
    ]  # fmt: skip
    assert ["1:00 h" in all_of_it.said[0], "0:30 h" in all_of_it.said[1], "0:15 h" in all_of_it.said[2]] == [
        True
    ] * 3
    (tmp_path / "first.json").unlink()
    rest = Scripted(tmp_path)
    rest.run()
    assert "0:30 h" in rest.said[0]  # the others are kept
    assert rest.said[1].startswith("second: kept in")


@contextlib.contextmanager
def opening(words: list[str], plan: dict[str, int], *files: str) -> Iterator[tuple[Path, object]]:
    made = parser("thing", "", "")
    made.add_argument("--seeds", type=int)
    add_options(made)
    options = ("quick", "seeds")
    with begun(made, made.parse_args(words), plan, name="thing", options=options, files=files) as opened:
        yield opened


def opened(words: list[str], plan: dict[str, int], *files: str) -> tuple[Path, object]:
    with opening(words, plan, *files) as (folder, found):
        told = json.loads((folder / PLAN).read_text())
        assert set(told.pop(FILES)) == set(files)
        assert told == found
    return folder, found


def test_a_folder_is_begun_once_and_resumed_with_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    assert opened(["--folder", str(folder)], {"seeds": 3}) == (folder, {"seeds": 3})
    assert f"python -m benchmarks.thing --resume {folder}" in capsys.readouterr().err
    assert opened(["--resume", str(folder)], {"seeds": 1}) == (folder, {"seeds": 3})


def test_without_a_folder_one_is_made_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = opened([], {})
    assert folder.parent == Path("runs")
    assert folder.name.startswith("thing-")
    quick, _ = opened(["--quick"], {})
    assert not quick.exists()
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--folder", "full"], "expected a new folder"),
        (["--resume", "full"], "expected a folder that python -m benchmarks.thing has begun"),
        (["--resume", "missing"], "expected a folder that python -m benchmarks.thing has begun"),
        (["--resume", "full", "--seeds", "2"], "expected --resume without --seeds"),
        (["--resume", "full", "--quick"], "expected --resume without --quick"),
        (["--resume", "full", "--folder", "new"], "not allowed with"),
    ],
)
def test_what_cannot_be_opened_is_told(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(SystemExit) as ended:
        opened(words, {})
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_body_s_own_errors_are_not_the_folder_s(tmp_path: Path) -> None:
    opened(["--folder", str(tmp_path / "kept")], {})
    made = parser("thing", "", "")
    add_options(made)
    arguments: argparse.Namespace = made.parse_args(["--resume", str(tmp_path / "kept")])
    with (
        pytest.raises(OSError, match="of the body"),
        begun(made, arguments, {}, name="thing", options=(), files=()),
    ):
        raise OSError("of the body")


def refused(words: list[str], *files: str) -> None:
    with pytest.raises(SystemExit) as ended:
        opened(words, {}, *files)
    assert ended.value.code == 2


def test_nobody_goes_on_in_a_folder_where_another_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    with opening(["--folder", str(folder)], {"seeds": 3}):
        refused(["--resume", str(folder)])
        assert "expected the folder" in (said := capsys.readouterr().err)
        assert f"{str(folder / 'run.lock')!r} names; wait for its end" in said
    with opening(["--resume", str(folder)], {}):
        refused(["--resume", str(folder)])
    opened(["--resume", str(folder)], {})


def test_a_folder_is_not_resumed_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, same, other = tmp_path / "kept", tmp_path / "same.yaml", tmp_path / "other.yaml"
    same.write_text("traces: 3\n")
    other.write_text("seeds: 3\n")
    files = (str(same), str(other))
    opened(["--folder", str(folder)], {"seeds": 3}, *files)
    assert opened(["--resume", str(folder)], {}, *files) == (folder, {"seeds": 3})
    other.write_text("seeds: 4\n")
    capsys.readouterr()
    refused(["--resume", str(folder)], *files)
    assert f"expected {other} as when {str(folder)!r} was begun" in capsys.readouterr().err
    other.unlink()
    refused(["--resume", str(folder)], *files)
    assert f"expected {str(other)!r}, which says what is measured" in capsys.readouterr().err
    refused(["--folder", str(tmp_path / "new")], *files)
    assert not (tmp_path / "new").exists()


def test_a_folder_from_before_there_were_digests_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PLAN).write_text('{"seeds": 3}\n')
    with opening(["--resume", str(tmp_path)], {}) as (_, found):
        assert found == {"seeds": 3}
    assert "could not be compared" in capsys.readouterr().err
