"""The benchmark of calls runs, and its figures add up. How large they are is nobody's business here."""

from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.mcp.__main__ import main
from benchmarks.mcp.measures import IN_PROCESS, WAYS
from benchmarks.mcp.report import NAMES, report
from benchmarks.wire.figures import Figures


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_quick_run_measures_every_way(tmp_path: Path) -> None:
    found = quick_benchmark("mcp", tmp_path, timeout_s=280)
    measured = {(row["of"], row["figure"]) for row in found["figures"] if row["median"] > 0}
    expected = {(way.name, name) for way in WAYS for name in NAMES}
    assert measured == expected - {(IN_PROCESS, "server µs a call")}


def test_ratios_are_over_the_call_that_nothing_lies_between() -> None:
    figures = Figures()
    figures.add("p50 µs", IN_PROCESS, "1 client", 200.0)
    figures.add("p50 µs", "ours, step()", "1 client", 100.0)
    rows = [[cell.strip() for cell in line.split("|")] for line in report(figures).splitlines()]
    assert {row[1]: row[-2] for row in rows[4:]} == {IN_PROCESS: "1.00", "ours, step()": "0.50"}


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "expected a number of at least 1, got '0'" in capsys.readouterr().err
