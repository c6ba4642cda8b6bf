"""Throughput of a run from its log; tests/rl_bridge/cli/test_bench_words.py has that between two snapshots."""

from pathlib import Path

import pytest

from rl_bridge.errors import StatusError
from rl_bridge.metrics.sinks import JsonlSink
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.throughput import ELAPSED, GROUPS, TARGETS, Throughput


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


def write_log(file: Path, rows: int) -> None:
    sink = JsonlSink(file)
    for iteration in range(1, rows + 1):
        elapsed_s = 100.0 if iteration == 1 else 100.0 + 10 * iteration
        sink.write(iteration, {ELAPSED: elapsed_s, GROUPS: 8.0, **trainer(10, 6, 3.5).metrics("trainer")})
    sink.close()


def test_run_that_is_over_has_logged_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(StatusError, match="name the folder of a run"):
        Throughput.from_log(file)
    write_log(file, 1)
    with pytest.raises(StatusError, match="at least two iterations with spans"):
        Throughput.from_log(file)
    file.unlink()
    write_log(file, 4)
    with file.open("a") as log:
        log.write('{"iteration": 5, "time/el')  # killed
    found = Throughput.from_log(file)
    assert (found.seconds, found.steps, found.groups) == (40, 3, 24)
    assert found.roles["trainer"].wall_s == pytest.approx(40)
    assert found.utilisation("trainer") == pytest.approx(0.6)
    assert found.unaccounted == pytest.approx(0.05)
    assert found.utilisation("coder") is found.meets_target("coder") is None
