"""Bars and reports follow from measurements; options become a plan; invalid ones are refused."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness import (
    FAILED,
    INTERRUPTED,
    MISSED,
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_most,
    in_rounds,
    load,
    setting,
)
from benchmarks.processes import ROOT
from benchmarks.sandbox.__main__ import BENCHMARK as SANDBOX
from benchmarks.wire.__main__ import BENCHMARK as WIRE
from benchmarks.wire.__main__ import ONE_CORE


@dataclass(frozen=True, kw_only=True)
class Plan:
    rounds: int = setting(2, quick=1, option="rounds")
    kinds: tuple[str, ...] = setting(("ours", "theirs"))
    flag: bool = setting(False, option="a flag")


def add(plan: Plan, measurements: Measurements) -> None:
    for number, kind in in_rounds(plan.rounds, plan.kinds):
        measurements.add("calls/s", kind, "1 client", number + 1.0)


def fail(plan: Plan, measurements: Measurements) -> None:
    raise KeyboardInterrupt if plan.flag else BenchmarkError("no server")


def bars(measurements: Measurements) -> Iterator[Bar]:
    yield from at_most("ours", measurements.median("calls/s", "ours", "1 client"), 1.0)
    yield from at_most("nobody's", measurements.median("calls/s", "nobody", "1 client"), 1.0)


TOY = Benchmark(about="Toy.", plan=Plan, sections=(add, fail), tables={"Calls": ("calls/s",)}, bars=bars)


@pytest.mark.parametrize(
    ("argv", "status", "rounds", "met"),
    [
        (["--only", "add", "--quick", "--check"], 0, [1.0], True),
        (["--only", "add", "--check"], MISSED, [1.0, 2.0], False),
        (["--only", "add"], 0, [1.0, 2.0], False),
        (["--quick", "--rounds", "3"], FAILED, [1.0, 2.0, 3.0], False),
        (["--flag"], INTERRUPTED, [1.0, 2.0], False),
    ],
)
def test_a_command_measures_reports_and_says_how_it_ended(
    argv: list[str],
    status: int,
    rounds: list[float],
    met: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest has set its own
    file = tmp_path / "new" / "out.json"
    assert TOY.run("toy", [*argv, "--json", str(file)]) == status
    found = json.loads(file.read_text())
    assert [(row["of"], row["rounds"]) for row in found["figures"]] == [("ours", rounds), ("theirs", rounds)]
    assert [(bar["what"], bar["met"]) for bar in found["bars"]] == [("ours", met)]
    output = capsys.readouterr().out
    assert ("NOT met" in output) != met
    assert ("### Not measured" in output) == bool(found["notes"]) == ("--only" not in argv)


def test_table_leaves_out_empty_columns() -> None:
    measurements = Measurements()
    measurements.add_times("call", "ours", "", [3.0, 1.0, 1234.0])
    benchmark = Benchmark(
        about="", plan=Plan, sections=(), tables={"T": ("call p50 ms", "call p95 ms", "CPU")}
    )
    assert benchmark.report(measurements, []).splitlines()[2:] == [
        "| of   | call p50 ms | call p95 ms |",
        "| ---- | ----------- | ----------- |",
        "| ours | 3.00        | 1,234       |",
    ]


def test_sandbox_bars_take_the_worst_level_and_anything_left() -> None:
    measurements = Measurements()
    for metric, subject, at, value in (
        *(("start p50 ms", "lsm", "numpy preloaded", value) for value in (14, 900, 3)),
        ("start p50 ms", "namespaces", "numpy preloaded", 31),
        ("start p50 ms", "Jupyter kernel", "", 700),
        ("burst p99 ms", "lsm", "100 at once", 450),
        ("burst p99 ms", "docker run", "100 at once", 8000),
        ("execute p50 ms", "lsm", "directly", 40),
        ("execute p50 ms", "lsm", "through the WebSocket", 0.5),
        ("MB a session", "lsm", "500 live", 5.5),
        ("MB a session", "Jupyter kernel", "one", 40),
        ("inside / plain", "lsm", "", 1.02),
        *((f"{kind} left", "lsm", "9 abandoned", left) for kind, left in (("processes", 0), ("files", 2))),
        ("descriptors left", "lsm", "9 abandoned", 0),
    ):
        measurements.add(metric, subject, at, value)
    found = list(SANDBOX.bars(measurements))
    assert [(bar.value, bar.met) for bar in found] == [
        (14, True), (31, False), (450, True), (0.05625, False), (0.5, True), (5.5, False), (1.02, True), (2, False),
    ]  # fmt: skip
    assert SANDBOX.report(measurements, found).count("NOT met") == 4


def test_weights_bars_take_the_median_of_times_and_the_most_of_memory() -> None:
    from benchmarks.weights.__main__ import BENCHMARK, MEMORY, STEADY

    measurements = Measurements()
    for ratio, share in ((2.0, 0.0), (9.0, 0.7), (3.5, 0.1)):
        measurements.add("to tensors / memcpy", "2 ranks", STEADY, ratio)
        measurements.add(MEMORY, "2 ranks", STEADY, share)
    assert [(bar.value, bar.met) for bar in BENCHMARK.bars(measurements)] == [(3.5, True), (0.7, False)]


def test_published_bars_divide_by_the_plain_side() -> None:
    from benchmarks.published import BENCHMARK

    measurements = Measurements()
    for side, part, rates in (
        ("our trainer", "trainer", (7, 80, 9)),
        ("transformers", "trainer", (10, 1, 30)),
        ("our engine", "engine", (7,)),
        ("vLLM", "engine", (10,)),
    ):
        for rate in rates:
            measurements.add("tokens/s", side, part, rate)
    assert [(bar.value, bar.met) for bar in BENCHMARK.bars(measurements)] == [(0.9, True), (0.7, False)]


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
            for table in ("over the floor", "server µs a step"):
                measurements.add(table, subject, f"64 sessions, {ONE_CORE}", value + noise)
    assert {(bar.value, bar.met) for bar in WIRE.bars(measurements)} == set(expected)


@pytest.mark.parametrize(
    ("name", "argv", "expected"),
    [
        ("mcp", ["--rounds", "0"], "expected a number of at least 1, got '0'"),
        ("sandbox", ["--levels", "root"], "got 'root'"),
        ("wire", ["--only", "nothing"], "expected some of step, metrics, clients, imports, concurrency"),
    ],
)
def test_bad_options_are_refused(
    name: str, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(name).run(name, argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_few_functions_are_entered_by_a_warm_step() -> None:
    command = [sys.executable, "-m", "benchmarks.wire.entered"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"(.+): (\d+) functions, (\d+) files", printed)
    counts = {name: (int(functions), int(files)) for name, functions, files in found}
    functions, files = counts["WebSocket, ropewalk serve"]
    assert (functions <= 30, files <= 9) == (True, True)
    assert counts["HTTP, ropewalk serve"][1] <= 12
