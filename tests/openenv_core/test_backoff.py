"""Exponential back-off: pauses that double up to a limit."""

import pytest

from openenv_core import backoff
from openenv_core.backoff import Backoff, exponential_pause_s


def test_backoff_grows_to_a_limit_and_respects_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff.random, "uniform", lambda least, most: most)
    pauses = Backoff(1.0, 6.0)
    assert [pauses.next_s() for _ in range(4)] == [1, 2, 4, 6]
    pauses.reset()
    assert [pauses.next_s(requested_s) for requested_s in (0.0, 5.0, 60.0)] == [1, 5, 6]
    failures = (1, 2, 7, 1025, 10**9)
    assert [exponential_pause_s(number, 0.1, 5.0) for number in failures] == [0.1, 0.2, 5, 5, 5]
