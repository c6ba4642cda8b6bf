"""The benchmark of weights runs, and its figures add up. How large they are is nobody's business here."""

from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.wire.figures import Figures


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_quick_run_measures_one_rank_and_two(tmp_path: Path) -> None:
    found = quick_benchmark("weights", tmp_path, "--transport", "shared_memory", timeout_s=280)
    measured = {
        (row["of"], row["load"]) for row in found["figures"] if row["figure"] == "to tensors / memcpy"
    }
    assert measured == {
        (f"shared_memory, {ranks}", load)
        for ranks in ("1 rank", "2 ranks")
        for load in ("the first transfer", "from then on")
    }
    # A rank of two needs memory for its half of the model: that is no matter of time, so it holds here too.
    gathered = [bar for bar in found["bars"] if bar["what"].startswith("a rank's memory")]
    assert len(gathered) == 2
    assert all(bar["met"] for bar in gathered)


@pytest.mark.heavy
def test_the_bars_take_the_median_of_times_and_the_most_of_memory() -> None:
    from benchmarks.weights.measures import MEMORY, STEADY
    from benchmarks.weights.report import bars, report

    figures = Figures()
    for ratio, share in ((2.0, 0.0), (9.0, 0.7), (3.5, 0.1)):
        figures.add("to tensors / memcpy", "shared_memory, 2 ranks", STEADY, ratio)
        figures.add(MEMORY, "shared_memory, 2 ranks", STEADY, share)
    times, memory = bars(figures)
    assert (times.value, times.met) == (3.5, True)
    assert (memory.value, memory.met) == (0.7, False)
    assert "| 0.70     | at most 0.6 | NOT met |" in report(figures, [times, memory])
