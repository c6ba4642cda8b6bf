"""Every benchmark's command runs with tiny numbers, and its figures add up. How large they are is not checked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from quick_benchmark import ROOT, quick_benchmark

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

Found = Any
Check = Callable[[Found], None]


def medians(found: Found) -> dict[tuple[str, str, str], float]:
    return {(row["figure"], row["of"], row["load"]): row["median"] for row in found["figures"]}


def check_asynchrony(found: Found) -> None:
    rates = {row["of"] for row in found["figures"] if row["figure"] == "groups/s" and row["median"] > 0}
    assert rates == {"synchronous", "max_staleness 1", "max_staleness 4"}
    met = {bar["what"]: bar["met"] for bar in found["bars"]}
    assert all(met[f"{who}: staleness"] for who in rates)


def check_mcp(found: Found) -> None:
    from benchmarks.mcp.measures import IN_PROCESS, WAYS
    from benchmarks.mcp.report import NAMES

    measured = {(row["of"], row["figure"]) for row in found["figures"] if row["median"] > 0}
    expected = {(way.name, name) for way in WAYS for name in NAMES}
    assert measured == expected - {(IN_PROCESS, "server µs a call")}


def check_preset(name: str) -> Check:
    def check(found: Found) -> None:
        from benchmarks.presets.measures import EXACT, HANDS, RATIO

        rounds = {row["figure"]: row["rounds"] for row in found["figures"] if row["of"] == name}
        assert [len(rounds[figure]) for figure in (RATIO, EXACT)] == [2, 2]
        assert rounds[HANDS] == [32.0, 64.0]

    return check


def check_recipes(found: Found) -> None:
    from benchmarks.recipes.measures import (
        IMITATED,
        IMITATED_TO_THE_END,
        REINFORCED,
        SECONDS,
        STEPS,
        TASKS,
        TAUGHT,
    )
    from benchmarks.recipes.plan import Plan

    figures = medians(found)
    for recipe in ("tools", "code"):
        for who in (TAUGHT, REINFORCED, IMITATED, IMITATED_TO_THE_END):
            assert figures[TASKS, who, recipe] == 8
            # The best evaluation may be the first, before any update.
            assert figures[STEPS, who, recipe] >= (who not in (TAUGHT, IMITATED))
        for who in (REINFORCED, IMITATED):
            assert figures[SECONDS, who, recipe] >= Plan().quick().seconds


def check_sampling(found: Found) -> None:
    from benchmarks.recipes.measures import DULL, GROUPS, TASKS
    from benchmarks.recipes.plan import SAMPLINGS, Plan

    figures = medians(found)
    for sampling in SAMPLINGS:
        assert 0 <= figures[DULL, sampling, "tools"] <= figures[GROUPS, sampling, "tools"]
        assert figures[GROUPS, sampling, "tools"] >= Plan().quick().groups
        assert figures[TASKS, sampling, "tools"] == 8


def check_rollouts(found: Found) -> None:
    from benchmarks.rollouts.measures import FAILED, GAMES, LEFT_OUT, RATE

    figures = medians(found)
    for game in GAMES:
        for load in ("1 session", "8 sessions"):
            assert figures[RATE, game.name, load] > 0
            assert figures[FAILED, game.name, load] == figures[LEFT_OUT, game.name, load] == 0


def check_routing(found: Found) -> None:
    assert len(found["bars"]) == 4
    assert {(row["figure"], row["of"]) for row in found["figures"] if row["median"] > 0} == {
        *((f, way) for f in ("makespan s", "p99 s", "mean s") for way in ("least loaded", "round robin")),
        *(("p50 µs a call", way) for way in ("route", "bare call")),
    }


def check_sync(found: Found) -> None:
    rows = {(row["figure"], row["of"]): row["rounds"] for row in found["figures"]}
    for state in ("an idle engine", "an engine at work"):
        whole, pause = rows["whole ms", state], rows["pause ms", state]
        parts = [rows[name, state] for name in ("put ms", "to tensors ms", "replacing the weights ms")]
        assert len(whole) == 2
        assert all(sum(each) < total for each, total in zip(zip(*parts, strict=True), whole, strict=True))
        assert all(0 < each < total for each, total in zip(pause, whole, strict=True))
    assert len(found["bars"]) == 2


def check_weights(found: Found) -> None:
    assert {
        (row["of"], row["load"]) for row in found["figures"] if row["figure"] == "to tensors / memcpy"
    } == {
        (f"shared_memory, {ranks}", load)
        for ranks in ("1 rank", "2 ranks")
        for load in ("the first transfer", "from then on")
    }
    # The memory of a rank does not depend on time, so its bar holds in a quick run too.
    gathered = [bar for bar in found["bars"] if bar["what"].startswith("a rank's memory")]
    assert [bar["met"] for bar in gathered] == [True, True]


def check_forks(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 8
    assert all(value > 0 for (figure, *_), value in measured.items() if figure != "server's CPU, ms")
    assert len(found["bars"]) == 4


def check_vector(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 20
    assert all(value > 0 for value in measured.values())
    assert len(found["bars"]) == 10


def check_wire(found: Found) -> None:
    from benchmarks.wire.plan import ONE_CORE

    figures = medians(found)
    for who in ("floor", "ours, inline", "ours, asynchronous", "ours, blocking"):
        load = f"8 sessions, {ONE_CORE}"
        rate, p50 = figures["steps/s", who, load], figures["p50 ms", who, load]
        # A server on one core cannot use more CPU than there is time.
        assert 0 < rate * figures["server µs a step", who, load] <= 1.05e6
        assert 0 < p50 <= figures["p99 ms", who, load]
        assert rate * p50 / 1e3 <= 2 * 8  # eight steps at a time are under way
        assert 0 < figures["start s", who, ""] < 60
        assert figures["kB a session", who, "32 idle"] > 0
    assert figures["import s", "ours", ""] > 0
    for kind in ("ours", "ours-typed"):
        for load in ("4 sockets", "1 socket, sync"):
            assert figures["client µs a step", kind, load] > 0


HEAVY = pytest.mark.heavy
WIRE = ["--no-released", "--only", "step,imports,clients"]


@pytest.mark.parametrize(
    ("name", "words", "check"),
    [
        pytest.param("asynchrony", [], check_asynchrony, marks=HEAVY),
        pytest.param("forks", [], check_forks),
        pytest.param("mcp", [], check_mcp),
        *(
            pytest.param("presets", ["--presets", preset], check_preset(preset), marks=HEAVY, id=preset)
            for preset in ("dr_grpo", "gspo", "cispo", "ppo")  # the others train in other tests
        ),
        pytest.param("recipes", [], check_recipes, marks=HEAVY),
        pytest.param("recipes", ["--sampling", "--recipes", "tools"], check_sampling, marks=HEAVY),
        pytest.param("rollouts", [], check_rollouts),
        pytest.param("routing", [], check_routing, marks=HEAVY),
        pytest.param("sync", [], check_sync, marks=HEAVY),
        pytest.param("vector", [], check_vector),
        pytest.param("weights", ["--transport", "shared_memory"], check_weights, marks=HEAVY),
        pytest.param("wire", WIRE, check_wire),
    ],
)
def test_quick_run_measures_everything(name: str, words: list[str], check: Check, tmp_path: Path) -> None:
    check(quick_benchmark(name, tmp_path, *words, timeout_s=500))


def test_sessions_that_wait_a_second_take_a_second(tmp_path: Path) -> None:
    words = ["--only", "concurrency", "--no-released"]
    figures = medians(quick_benchmark("wire", tmp_path, *words, timeout_s=90))
    who = {of for _, of, _ in figures}
    assert who == {"floor, waiting", "ours, waiting"}
    for (figure, _, _), value in figures.items():
        if figure.startswith("% succeed"):
            assert value == 100
        if figure.startswith(("p50 s", "p99 s")):
            assert value >= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the sandbox isolates nothing elsewhere")
def test_sandbox_run_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.sandbox",
            "--quick",
            "--no-peers",
            "--levels",
            "lsm",
            "--json",
            str(out),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(out.read_text())
    if any(note.startswith("lsm: ") for note in found["notes"]):
        missing(f"needs the level lsm: {found['notes']}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert found["notes"] == []
    figures = {(row["figure"], row["load"]): row["median"] for row in found["figures"]}
    assert 0 < figures["start p50 ms", "nothing preloaded"] <= figures["start p95 ms", "nothing preloaded"]
    for load in ("directly", "through the WebSocket"):
        assert 0 < figures["execute p50 ms", load] <= figures["execute p95 ms", load]
    inside, plain = (figures[f"{who} µs a turn", ""] for who in ("inside", "plain python"))
    assert figures["inside / plain", ""] == pytest.approx(inside / plain)
    load = "6 abandoned, 3 at once"
    assert figures["reclaimed s", load] > 0
    assert [figures[f"{what} left", load] for what in ("processes", "files", "descriptors")] == [0, 0, 0]
