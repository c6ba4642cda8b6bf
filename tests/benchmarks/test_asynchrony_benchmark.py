"""The benchmark of asynchrony runs, and its figures add up. How large they are is nobody's business here."""

from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.asynchrony.report import bars, bound, report
from benchmarks.wire.figures import Figures


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_quick_run_measures_every_bound(tmp_path: Path) -> None:
    found = quick_benchmark("asynchrony", tmp_path, timeout_s=280)
    rates = {row["of"] for row in found["figures"] if row["figure"] == "groups/s" and row["median"] > 0}
    assert rates == {"synchronous", "max_staleness 1", "max_staleness 4"}
    held = {bar["what"]: bar["met"] for bar in found["bars"]}
    assert all(held[f"{who}: staleness"] for who in rates)


def test_gain_and_bound_are_worked_out_from_the_synchronous_loop() -> None:
    figures = Figures()
    for name, rate, roll, stalest in (
        ("synchronous", 4.0, 0.9, 0),
        ("max_staleness 1", 7.0, 0.1, 1),
        ("max_staleness 4", 6.0, 0.0, 5),
    ):
        for figure, value in (
            ("groups/s", rate),
            ("roll s", roll),
            ("train s", 1.0),
            ("sync s", 0.1),
            ("most stale", stalest),
        ):
            figures.add(figure, name, "", value)
    assert bound(figures) == pytest.approx(2.0)
    held = {(bar.what, bar.kind): bar for bar in bars(figures)}
    assert held["roll over a synchronous step", "at least"].value == pytest.approx(0.45)
    assert held["max_staleness 1: groups/s over synchronous", "at least"].met
    assert not held["max_staleness 4: groups/s over synchronous", "at least"].met
    assert not held["max_staleness 4: staleness", "at most"].met
    assert "| max_staleness 1 | 7.00     | 1.75" in report(figures)
