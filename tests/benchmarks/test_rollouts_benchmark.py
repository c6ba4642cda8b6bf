"""The benchmark of rollouts runs, and its figures add up. How large they are is nobody's business here."""

from pathlib import Path

import pytest
from quick_benchmark import quick_benchmark

from benchmarks.rollouts.measures import FAILED, GAMES, IN_FLIGHT, LEFT_OUT, RATE
from benchmarks.rollouts.report import bars, report
from benchmarks.wire.figures import Figures


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_quick_run_plays_every_game(tmp_path: Path) -> None:
    found = quick_benchmark("rollouts", tmp_path, timeout_s=280)
    medians = {(row["figure"], row["of"], row["load"]): row["median"] for row in found["figures"]}
    for game in GAMES:
        for load in ("1 session", "8 sessions"):
            assert medians[RATE, game.name, load] > 0
            assert medians[FAILED, game.name, load] == medians[LEFT_OUT, game.name, load] == 0


def test_bars_are_about_the_worst_round_of_256_sessions() -> None:
    figures = Figures()
    for load, rate in (("1 session", 10.0), ("256 sessions", 400.0)):
        for failed, in_flight in ((0, 256), (1, 255), (0, 256)):
            figures.add(RATE, "BlackJack", load, rate)
            figures.add(IN_FLIGHT, "BlackJack", load, in_flight)
            figures.add(FAILED, "BlackJack", load, failed)
            figures.add(LEFT_OUT, "BlackJack", load, 0)
    assert [(bar.value, bar.met) for bar in bars(figures)] == [(1, False), (0, True), (255, False)]
    rows = [[cell.strip() for cell in line.split("|")] for line in report(figures).splitlines()]
    assert ["", "256 sessions", "BlackJack", "400", "256", "0", "0", "40.0", ""] in rows
