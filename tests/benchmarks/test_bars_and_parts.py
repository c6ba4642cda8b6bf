"""Bars and reports are worked out from figures; long benchmarks keep each part and can be resumed."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from module_run import ROOT

import benchmarks.asynchrony.report as asynchrony
import benchmarks.presets.report as presets
import benchmarks.recipes.report as recipes
import benchmarks.routing.report as routing
import benchmarks.sandbox.report as sandbox
import benchmarks.wire.bars as wire
from benchmarks.commandline import create_parser
from benchmarks.mcp.__main__ import main as mcp_main
from benchmarks.parts import FILES, PLAN, Parts, add_options, open_folder
from benchmarks.presets import __main__ as presets_command
from benchmarks.presets.measures import EXACT, HANDS, add_run
from benchmarks.recipes import __main__ as recipes_command
from benchmarks.recipes.measures import (
    GROUPS,
    IMITATED,
    REINFORCED,
    SECONDS,
    SEED,
    SETTLED,
    SOLVED,
    STEPS,
    TASKS,
    TAUGHT,
    WITHOUT_GRADIENT,
)
from benchmarks.sandbox.__main__ import main as sandbox_main
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.plan import ONE_CORE

PLANNED = {"first": 1800.0, "second": 900.0, "third": 900.0}


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


def test_routing_bars_compare_medians_of_the_same_load() -> None:
    measurements = Measurements()
    for strategy, makespans in (("round robin", [2.0, 4.0, 3.0]), ("least loaded", [1.0, 9.0, 1.5])):
        for makespan in makespans:
            measurements.add("makespan s", strategy, "one slowed three times", makespan)
    (bar,) = routing.bars(measurements)
    assert (bar.value, bar.met) == (pytest.approx(0.5), True)


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
    ("rows", "unmet"),
    [
        ([(1.0, 0.0, -0.2), (0.99, 0.1, -0.05)], []),
        ([(1.0, 0.0, -0.05), (0.99, 0.1, -0.07)], ["exact return"]),
        ([(1.0, 0.1, -0.05), (1.0, 0.0, -0.05)], ["mean ratio, at most so far from 1"]),
        ([(0.99, 0.0, -0.05)], ["share clipped, the largest"]),
        ([(0.99, 1.0, -0.05)], ["share clipped, the smallest"]),
        ([(0.99, 0.1, -0.05)] * 7, ["seconds"]),
    ],
)
def test_presets_bars(tmp_path: Path, rows: list[tuple[float, float, float]], unmet: list[str]) -> None:
    lines = [
        {
            "iteration": number,
            "loss/ratio_mean": ratio,
            "loss/clip_fraction_low": clipped,
            "loss/clip_fraction_high": 0.0,
            "probe/exact_return": exact,
            "time/elapsed_s": 100.0 * number,
            "rollout/trajectories": 8.0,
            "rollout/groups": 2.0,
            "rollout/refused_groups": 1.0,
        }
        for number, (ratio, clipped, exact) in enumerate(rows, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    measurements = Measurements()
    add_run(tmp_path, measurements, "dapo", "seed 0")
    assert [bar.label.split(": ")[1] for bar in presets.bars(measurements) if not bar.met] == unmet
    # 8 hands in 2 groups and one group that was dropped: 12 an iteration.
    assert measurements.values[HANDS, "dapo", "seed 0"] == [
        12.0 * number for number in range(1, len(rows) + 1)
    ]
    assert measurements.values[EXACT, "dapo", "seed 0"] == [exact for *_, exact in rows]


def recipe_figures(taught: int, *solved: int, tasks: int = 1000, settled: float = 1.0) -> Measurements:
    measurements = Measurements()
    for subject, counts in ((TAUGHT, (taught,)), (REINFORCED, solved), (IMITATED, (taught,))):
        for seed, count in enumerate(counts):
            lost = count < 0  # a run whose tasks were all lost
            values = ((SEED, seed), (SOLVED, max(0, count)), (TASKS, 0 if lost else tasks))
            for metric, value in (*values, (STEPS, 9), (SECONDS, 900)):
                measurements.add(metric, subject, "tools", value)
    measurements.add(SETTLED, TAUGHT, "tools", settled)
    return measurements


@pytest.mark.parametrize(
    ("measurements", "unmet"),
    [
        (recipe_figures(300, 420, 500, 600), set()),
        (recipe_figures(300, 600, 390), {"seed 1: more solved"}),  # 9 points; the intervals are apart
        (recipe_figures(150, 300, 190, tasks=500), {"seed 1: more solved", "seed 1: between the intervals"}),
        (recipe_figures(150, 300, 340, tasks=499), {"held-out tasks"}),
        (
            recipe_figures(300, 600, -1),
            {"held-out tasks", "seed 1: more solved", "seed 1: between the intervals"},
        ),
        (recipe_figures(300, 420, settled=0.0), {"validation loss stopped falling"}),
    ],
)
def test_recipes_bars(measurements: Measurements, unmet: set[str]) -> None:
    labels = {
        bar.label.removeprefix("tools").lstrip(":, ") for bar in recipes.bars(measurements) if not bar.met
    }
    assert labels == unmet
    assert recipes.report(measurements)


def test_ways_to_draw_tasks_are_compared_seed_by_seed() -> None:
    measurements = Measurements()
    for sampling, seed, groups, without_gradient in (
        ("uniform", 0, 640, 480), ("uniform", 1, 640, 320), ("signal", 1, 650, 260), ("signal", 0, 660, 264),
    ):  # fmt: skip
        row = {GROUPS: groups, WITHOUT_GRADIENT: without_gradient, SEED: seed, SOLVED: 9, TASKS: 10}
        for metric, value in {**row, STEPS: 9, SECONDS: 9}.items():
            measurements.add(metric, sampling, "code", value)
    bars = {bar.label: (bar.value, bar.met) for bar in recipes.bars(measurements)}
    assert bars == {
        "code, seed 0: fewer groups without gradient": (pytest.approx(1 - 0.4 / 0.75), True),
        "code, seed 1: fewer groups without gradient": (pytest.approx(0.2), False),
    }
    assert [cell.strip() for cell in recipes.report(measurements).split("| signal ")[-1].split("|")[1:4]] == [
        "0", "660", "40.0%",
    ]  # fmt: skip


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


class Scripted:
    """Measures the planned parts; those that are to fail do."""

    def __init__(self, folder: Path, *, failing: str = "", end: type[BaseException] = ValueError) -> None:
        self.measurements = Measurements()
        self.said: list[str] = []
        self.measured: list[str] = []
        self._failing, self._end = failing, end
        self.parts = Parts(folder, PLANNED, self.measurements, self.said.append)

    def run(self) -> list[bool]:
        return [self.parts.measure(name, self._part(name)) for name in PLANNED]

    def _part(self, name: str) -> Callable[[Path, Measurements], None]:
        def measure(folder: Path, measurements: Measurements) -> None:
            assert not folder.exists()
            folder.mkdir()
            self.measured.append(name)
            measurements.add("solved", "us", name, 1.0)
            if name == self._failing:
                raise self._end("something broke")
            measurements.add("solved", "us", name, 2.0)

        return measure


def test_kept_parts_are_not_measured_again(tmp_path: Path) -> None:
    once, again = Scripted(tmp_path), Scripted(tmp_path)
    assert once.run() == again.run() == [True] * 3
    assert (once.measured, again.measured) == (list(PLANNED), [])
    assert once.measurements == again.measurements
    assert ["1:00 h" in once.said[0], "0:30 h" in once.said[1], "0:15 h" in once.said[2]] == [True] * 3


def test_failed_part_is_noted_without_figures_and_measured_next_time(tmp_path: Path) -> None:
    failed = Scripted(tmp_path, failing="second")
    assert failed.run() == [True, False, True]
    assert failed.measurements.notes == [f"second: ValueError: something broke ({tmp_path / 'second.log'})"]
    assert ("solved", "us", "second") not in failed.measurements.values
    assert "Traceback" in (tmp_path / "second.log").read_text()
    again = Scripted(tmp_path)
    assert again.run() == [True] * 3
    assert (again.measured, again.measurements.notes) == (["second"], [])


def test_interruption_keeps_finished_parts(tmp_path: Path) -> None:
    interrupted, again = Scripted(tmp_path, failing="second", end=KeyboardInterrupt), Scripted(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    assert again.run() == [True] * 3
    assert again.measured == ["second", "third"]


@contextlib.contextmanager
def opening(argv: list[str], plan: dict[str, int], *files: str) -> Iterator[tuple[Path, object]]:
    parser = create_parser("thing", "", "")
    parser.add_argument("--seeds", type=int)
    add_options(parser)
    given = {"name": "thing", "options": ("quick", "seeds"), "files": files}
    with open_folder(parser, parser.parse_args(argv), plan, **given) as opened:
        yield opened


def assert_refused(argv: list[str], *files: str) -> None:
    with pytest.raises(SystemExit) as ended, opening(argv, {}, *files):
        pass
    assert ended.value.code == 2


def test_folder_is_resumed_with_its_plan_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opening(["--folder", str(folder)], {"seeds": 3}) as opened:
        assert opened == (folder, {"seeds": 3})
        assert_refused(["--resume", str(folder)])
    with opening(["--resume", str(folder)], {"seeds": 1}) as opened:
        assert opened == (folder, {"seeds": 3})
    assert_refused(["--folder", str(folder)])
    assert_refused(["--resume", str(folder), "--seeds", "2"])
    assert_refused(["--resume", str(tmp_path / "missing")])
    with pytest.raises(OSError, match="of the body"), opening(["--resume", str(folder)], {}):
        raise OSError("of the body")


def test_folder_is_not_resumed_after_its_files_changed(tmp_path: Path) -> None:
    folder, file = tmp_path / "kept", tmp_path / "measured.yaml"
    file.write_text("seeds: 3\n")
    with opening(["--folder", str(folder)], {"seeds": 3}, str(file)):
        pass
    with opening(["--resume", str(folder)], {}, str(file)) as opened:
        assert opened == (folder, {"seeds": 3})
    file.write_text("seeds: 4\n")
    assert_refused(["--resume", str(folder)], str(file))
    file.unlink()
    assert_refused(["--resume", str(folder)], str(file))


@pytest.mark.parametrize(
    ("main", "argv", "files"),
    [
        (
            recipes_command,
            ["--recipes", "code"],
            {"examples/sft/code.yaml", "examples/grpo_code/config.yaml"},
        ),
        (presets_command, ["--presets", "ppo"], {"examples/grpo_blackjack/config.yaml"}),
    ],
)
def test_long_commands_note_the_files_that_they_measure(
    main: ModuleType, argv: list[str], files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(main, "measure", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest has set its own
    folder = tmp_path / "kept"
    assert main.main(["--folder", str(folder), *argv]) == 0
    assert set(json.loads((folder / PLAN).read_text())[FILES]) == files
    assert main.main(["--resume", str(folder)]) == 0
