"""Throughput next to its targets; tests/rl_bridge/cli/test_bench_words.py has that of a run."""

import pytest

from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.throughput import TARGETS, Throughput


def trainer(wall_s: float, train_s: float, rest_s: float) -> SpanTotals:
    seconds: dict[tuple[str, str | None], float] = {("train", None): train_s, ("rest", "batches"): rest_s}
    return SpanTotals(began=1.0, wall_s=wall_s, cpu_s=0.0, seconds=seconds)


@pytest.mark.parametrize(
    ("role", "busy_s", "met"),
    [("trainer", 90, True), ("trainer", 89, False), ("controller", 100, None)],
)
def test_targets(role: str, busy_s: float, met: bool | None) -> None:
    found = Throughput(seconds=100, steps=1, groups=1, roles={role: trainer(100, busy_s, 100 - busy_s)})
    assert found.meets_target(role) is met
    targets = found.as_json()["targets"]
    assert targets == ({} if met is None else {role: {"at_least": TARGETS[role], "met": met}})
