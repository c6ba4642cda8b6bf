"""The penalty near the greatest length, by hand."""

import pytest

from rl_bridge.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    # Up to 16 tokens nothing, then a quarter a token, and no more than 1.
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)],
)
def test_it_falls_linearly(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_length=20, buffer=4) == pytest.approx(expected)


def test_a_buffer_of_everything() -> None:
    assert overlong_penalty(5, max_length=10, buffer=10) == pytest.approx(-0.5)
