"""Throughput of a run: between two snapshots, or from its log."""

from pathlib import Path

import pytest

from rl_bridge.errors import StatusError
from rl_bridge.metrics.sinks import JsonlSink
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import StatusSnapshot
from rl_bridge.metrics.throughput import ELAPSED, GROUPS, TARGETS, Throughput
from tests.rl_bridge.metrics.status_fixtures import snapshot


def later(first: StatusSnapshot, **changes: object) -> StatusSnapshot:
    return first.model_copy(update={"taken": first.taken + 20.0, "version": first.version + 4, **changes})


def trainer(wall_s: float, train_s: float, rest_s: float, began: float = 1.0) -> SpanTotals:
    seconds: dict[tuple[str, str | None], float] = {("train", None): train_s, ("rest", "batches"): rest_s}
    return SpanTotals(began=began, wall_s=wall_s, cpu_s=0.0, seconds=seconds)


def test_stretch_between_two_snapshots() -> None:
    first = snapshot().model_copy(update={"spans": {"trainer-0": trainer(100, 10, 80)}})
    second = later(first, groups={"trained": 128}, spans={"trainer-0": trainer(120, 22, 86)})
    found = Throughput.from_snapshots(first, second)
    assert (found.seconds, found.steps, found.groups) == (20, 4, 32)
    assert found.utilisation("trainer") == pytest.approx(12 / 20)
    assert found.unaccounted == pytest.approx(2 / 20)
    assert found.utilisation("coder") is None
    assert found.meets_target("coder") is found.meets_target("policy") is None


@pytest.mark.parametrize(
    ("role", "busy_s", "met"),
    [("trainer", 90, True), ("trainer", 89, False), ("controller", 100, None)],
)
def test_targets(role: str, busy_s: float, met: bool | None) -> None:
    found = Throughput(seconds=100, steps=1, groups=1, roles={role: trainer(100, busy_s, 100 - busy_s)})
    assert found.meets_target(role) is met
    targets = found.as_json()["targets"]
    assert targets == ({} if met is None else {role: {"at_least": TARGETS[role], "met": met}})


def write_log(folder: Path, rows: int, *, groups: bool = True) -> Path:
    file = folder / "metrics.jsonl"
    sink = JsonlSink(file)
    for iteration in range(1, rows + 1):
        metrics = trainer(10, 6, 3.5).metrics("trainer") | {
            ELAPSED: 100.0 if iteration == 1 else 100.0 + 10 * iteration
        }
        sink.write(iteration, metrics | ({GROUPS: 8.0} if groups else {}))
    sink.close()
    return file


def test_run_that_is_over_has_logged_it(tmp_path: Path) -> None:
    file = write_log(tmp_path, 4)
    with file.open("a") as log:
        log.write('{"iteration": 5, "time/el')  # killed
    found = Throughput.from_log(file)
    assert (found.seconds, found.steps, found.groups) == (40, 3, 24)
    assert found.roles["trainer"].wall_s == pytest.approx(40)
    assert found.utilisation("trainer") == pytest.approx(0.6)
    assert found.unaccounted == pytest.approx(0.05)


def test_log_without_spans_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(StatusError, match="name the folder of a run"):
        Throughput.from_log(tmp_path / "metrics.jsonl")
    with pytest.raises(StatusError, match="at least two iterations with spans"):
        Throughput.from_log(write_log(tmp_path, 1))
