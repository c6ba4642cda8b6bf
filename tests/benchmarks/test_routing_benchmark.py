"""The benchmark of routing runs, and its figures add up. How large they are is nobody's business here."""

from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.routing.report import bars, report
from benchmarks.wire.figures import Figures


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_quick_run_measures_both_ways(tmp_path: Path) -> None:
    found = quick_benchmark("routing", tmp_path, timeout_s=280)
    assert len(found["bars"]) == 4
    measured = {(row["figure"], row["of"]) for row in found["figures"] if row["median"] > 0}
    assert measured == {
        *(
            (figure, way)
            for figure in ("makespan s", "p99 s", "mean s")
            for way in ("least loaded", "round robin")
        ),
        *(("p50 µs a call", way) for way in ("route", "bare call")),
    }


def test_the_bars_compare_medians_of_the_same_load() -> None:
    figures = Figures()
    for way, makespans in (("round robin", [2.0, 4.0, 3.0]), ("least loaded", [1.0, 9.0, 1.5])):
        for makespan in makespans:
            figures.add("makespan s", way, "one slowed three times", makespan)
    (bar,) = bars(figures)
    assert bar.what == "makespan, one slowed three times: least loaded / round robin"
    assert bar.value == pytest.approx(0.5)
    assert bar.met
    assert "| makespan, one slowed three times: least loaded / round robin | 0.50" in report(figures)
