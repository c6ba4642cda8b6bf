"""`ropewalk bench throughput`: measurements, output and exit status."""

import json
from pathlib import Path

import pytest

from openenv_core.cli.main import run
from rl_bridge.cli.bench import COMMAND
from rl_bridge.metrics.sinks import JsonlSink
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import StatusSnapshot
from tests.rl_bridge.metrics.status_fixtures import served, snapshot


def bench(*arguments: str) -> int:
    return run(COMMAND, ["throughput", *arguments])


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


class Run:
    """Trains 8 groups and works for 10 s between two looks."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> StatusSnapshot:
        self.looks += 1
        first = snapshot(wall_s=10.0 * self.looks, version=self.looks)
        return first.model_copy(update={"taken": 10.0 * self.looks, "groups": {"trained": 8 * self.looks}})


def test_live_run_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Run()) as address:
        assert bench("--addr", address, "--seconds", "0.25") == 0
    output = capsys.readouterr().out
    assert "1 steps in 10.0 s, 0.80 groups a second" in output
    assert "unaccounted time at most 1.0%, within the 2% allowed" in output
    assert "trainer had something to do 50.0% of the time; the target of 90% is missed" in output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    assert ["trainer", "50.0%", "49.0%", "1.0%", "50.0%", "train 50.0%", "batches 49.0%"] in cells


def log(folder: Path) -> None:
    seconds: dict[tuple[str, str | None], float] = {("train", None): 0.5, ("rest", "batches"): 0.4}
    totals = SpanTotals(began=0.0, wall_s=1.0, cpu_s=0.5, seconds=seconds)
    sink = JsonlSink(folder / "metrics.jsonl")
    for iteration in (1, 2, 3):
        sink.write(iteration, {"time/elapsed_s": 5.0 * iteration, **totals.metrics("trainer")})
    sink.close()


def test_run_that_is_over_or_was_killed_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path)
    assert bench("--run", str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert "2 steps in 10.0 s\n" in output
    assert "trainer had something to do 50.0% of the time; the target of 90% is missed" in output
    assert "unaccounted time at most 10.0%, above the 2% allowed" in output
    # One that was killed has left its address.
    (tmp_path / "status.json").write_text('{"address": "127.0.0.1:1", "began": 1}')
    assert bench("--run", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_nothing_to_measure_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 1
    assert "found none" in capsys.readouterr().err
    assert bench("--run", str(tmp_path)) == 1
    assert "metrics.jsonl" in capsys.readouterr().err
    for odd in ("0", "nan", "inf"):
        assert bench("--seconds", odd) == 2
        assert f"expected --seconds above 0, got {odd}" in capsys.readouterr().err
