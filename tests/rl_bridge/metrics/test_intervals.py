"""Student's intervals, against his table."""

import pytest

from rl_bridge.metrics.intervals import mean_interval, student_95


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.706), (30, 2.042), (40, 2.0211), (10**6, 1.96)],
)
def test_quantiles(degrees: int, t: float) -> None:
    assert student_95(degrees) == pytest.approx(t, abs=1e-4)


def test_by_hand() -> None:
    # Mean 2, standard deviation 1, t of 2 degrees 4.303: 4.303 / sqrt(3) = 2.4843.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-4)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0]])
def test_what_has_no_spread_has_no_interval(values: list[float]) -> None:
    assert mean_interval(values) is None
