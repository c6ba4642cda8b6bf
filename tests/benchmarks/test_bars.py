"""Bars and reports are worked out from figures; invalid options are refused."""

from collections.abc import Callable

import pytest

import benchmarks.asynchrony.report as asynchrony
import benchmarks.sandbox.report as sandbox
import benchmarks.wire.bars as wire
from benchmarks.mcp.__main__ import main as mcp_main
from benchmarks.sandbox.__main__ import main as sandbox_main
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.plan import ONE_CORE


def test_asynchrony_bars_compare_with_the_synchronous_loop() -> None:
    measurements = Measurements()
    for name, rate, roll, stalest in (
        ("synchronous", 4.0, 0.9, 0),
        ("max_staleness 1", 7.0, 0.1, 1),
        ("max_staleness 4", 6.0, 0.0, 5),
    ):
        values = {"groups/s": rate, "roll s": roll, "train s": 1.0, "sync s": 0.1, "most stale": stalest}
        for metric, value in values.items():
            measurements.add(metric, name, "", value)
    assert asynchrony.bound(measurements) == pytest.approx(2.0)
    all_bars = {(bar.label, bar.kind): bar for bar in asynchrony.bars(measurements)}
    assert all_bars["roll over a synchronous step", "at least"].value == pytest.approx(0.45)
    assert all_bars["max_staleness 1: groups/s over synchronous", "at least"].met
    assert not all_bars["max_staleness 4: groups/s over synchronous", "at least"].met
    assert not all_bars["max_staleness 4: staleness", "at most"].met
    assert "| max_staleness 1 | 7.00     | 1.75" in asynchrony.report(measurements)


def test_sandbox_bars_take_the_worst_level_and_anything_left() -> None:
    measurements = Measurements()
    for metric, subject, load, value in (
        *(("start p50 ms", "lsm", "numpy preloaded", value) for value in (14, 900, 3)),
        ("start p50 ms", "namespaces", "numpy preloaded", 31),
        ("start p50 ms", "Jupyter kernel", "", 700),
        ("burst p99 ms", "lsm", "100 at once", 450),
        ("burst p99 ms", "docker run", "100 at once", 8000),
        ("execute p50 ms", "lsm", "directly", 40),
        ("execute p50 ms", "lsm", "through the WebSocket", 0.5),
        ("MB a session", "lsm", "500 live", 5.5),
        ("server kB a session", "lsm", "500 live", 4),
        ("MB a session", "Jupyter kernel", "one", 40),
        ("inside / plain", "lsm", "", 1.02),
        *((f"{kind} left", "lsm", "9 abandoned", left) for kind, left in (("processes", 0), ("files", 2))),
        ("descriptors left", "lsm", "9 abandoned", 0),
    ):
        measurements.add(metric, subject, load, value)
    all_bars = list(sandbox.bars(measurements))
    assert [(bar.value, bar.met) for bar in all_bars] == [
        (31, False), (14, True), (450, True), (0.05625, False), (0.5, True), (5.5, False), (1.02, True), (2, False),
    ]  # fmt: skip
    assert dict(sandbox.ratios(measurements))["start: Jupyter kernel / lsm, numpy preloaded"] == "50"
    assert sandbox.report(measurements, all_bars).count("NOT met") == 4


@pytest.mark.heavy
def test_weights_bars_take_the_median_of_times_and_the_most_of_memory() -> None:
    from benchmarks.weights.measures import MEMORY, STEADY
    from benchmarks.weights.report import bars

    measurements = Measurements()
    for ratio, share in ((2.0, 0.0), (9.0, 0.7), (3.5, 0.1)):
        measurements.add("to tensors / memcpy", "shared_memory, 2 ranks", STEADY, ratio)
        measurements.add(MEMORY, "shared_memory, 2 ranks", STEADY, share)
    assert [(bar.value, bar.met) for bar in bars(measurements)] == [(3.5, True), (0.7, False)]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (1.0, [(1.0, True), (5.0, True), (1.25, True), (4.0, True)]),
        (2.0, [(2.0, False), (2.5, False), (2.25, False), (5 / 2.25, True)]),
    ],
)
def test_wire_bars_compare_medians(ours: float, expected: list[tuple[float, bool]]) -> None:
    measurements = Measurements()
    values = {"ours, inline": ours, "ours, blocking": ours + 0.25, "released, sync": 5.0}
    for subject, value in values.items():
        for noise in (0, -0.25, 20):
            measurements.add("over the floor", subject, f"64 sessions, {ONE_CORE}", value + noise)
    all_bars = {(bar.value, bar.met) for bar in wire.bars(measurements)}
    assert all_bars == set(expected)


@pytest.mark.parametrize(
    ("main", "argv", "expected"),
    [
        (mcp_main, ["--rounds", "0"], "expected a number of at least 1, got '0'"),
        (sandbox_main, ["--levels", "root"], "got 'root'"),
        (sandbox_main, ["--preload", "os;evil"], "expected names of modules, got 'os;evil'"),
    ],
)
def test_bad_options_are_refused(
    main: Callable[[list[str]], int], argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
