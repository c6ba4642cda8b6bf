"""Every benchmark's command runs with tiny numbers, and its figures add up. How large they are is not checked."""

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from missing import missing
from module_run import ROOT, run_module
from published import published_model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

Found = Any
Check = Callable[[Found], None]


def quick_benchmark(name: str, folder: Path, *arguments: str, timeout_s: float) -> Found:
    out = folder / "out.json"
    command = ("--quick", *arguments, "--json", str(out))
    done = run_module(f"benchmarks.{name}", *command, cwd=ROOT, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(out.read_text())
    assert report["notes"] == []
    return report


def medians(found: Found) -> dict[tuple[str, str, str], float]:
    return {(row["figure"], row["of"], row["load"]): row["median"] for row in found["figures"]}


def check_asynchrony(found: Found) -> None:
    rates = {row["of"] for row in found["figures"] if row["figure"] == "groups/s" and row["median"] > 0}
    assert rates == {"synchronous", "max_staleness 1", "max_staleness 4"}
    met = {bar["what"]: bar["met"] for bar in found["bars"]}
    assert all(met[f"{subject}: staleness"] for subject in rates)


def check_controller(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 8
    # Of short chats a trajectory's own bytes are a larger part; of lists they are few.
    assert measured["bytes/token", "lists", ""] > 5 * measured["bytes/token", "keys", ""]
    assert measured["objects/trajectory", "keys", ""] < 16


def check_cluster(found: Found) -> None:
    measured = medians(found)
    assert {load for _, _, load in measured} == {"even", "1% stragglers, a host lost"}
    assert {of for _, of, _ in measured} == {"20 GPUs"}
    assert all(value > 0 for value in measured.values())


def check_concurrency(found: Found) -> None:
    assert all(bar["met"] for bar in found["bars"])
    assert len(found["bars"]) == 2


def check_mcp(found: Found) -> None:
    from benchmarks.mcp.__main__ import CALL_METHODS, FIGURES, IN_PROCESS

    measured = {(row["of"], row["figure"]) for row in found["figures"] if row["median"] > 0}
    expected = {(method, name) for method in CALL_METHODS for name in (*FIGURES, "p50 over in-process")}
    assert measured == expected - {(IN_PROCESS, "server µs a call")}


def check_weights(found: Found) -> None:
    ratios = {(row["of"], row["load"]) for row in found["figures"] if row["figure"] == "to tensors / memcpy"}
    subjects = ("1 rank", "2 ranks")
    assert ratios == {*product(subjects, ("the first transfer", "from then on"))}
    # The memory of a rank does not depend on time, so its bar holds in a quick run too.
    gathered = [bar for bar in found["bars"] if bar["what"].startswith("a rank's memory")]
    assert [bar["met"] for bar in gathered] == [True, True]


def check_connects(found: Found) -> None:
    assert {row["of"] for row in found["figures"] if row["median"] > 0} == {"fleet", "direct"}
    assert len(found["bars"]) == 1


def check_forks(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 4
    assert all(value > 0 for value in measured.values())
    assert len(found["bars"]) == 4


def check_seats(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 3
    assert all(value > 0 for value in measured.values())
    assert len(found["bars"]) == 2


def check_vector(found: Found) -> None:
    measured = medians(found)
    assert len(measured) == 20
    assert all(value > 0 for value in measured.values())
    assert len(found["bars"]) == 10


def check_wire(found: Found) -> None:
    from benchmarks.wire.__main__ import ONE_CORE

    measurements = medians(found)
    for subject in ("floor", "ours, inline", "ours, asynchronous", "ours, blocking", "released, sync"):
        load = f"8 sessions, {ONE_CORE}"
        rate, p50 = measurements["steps/s", subject, load], measurements["p50 ms", subject, load]
        # A server on one core cannot use more CPU than there is time.
        assert 0 < rate * measurements["server µs a step", subject, load] <= 1.05e6
        assert 0 < p50 <= measurements["p99 ms", subject, load]
        assert rate * p50 / 1e3 <= 2 * 8  # eight steps at a time are under way
        assert 0 < measurements["start s", subject, ""] < 60
        assert measurements["kB a session", subject, "32 idle"] > 0
    assert measurements["import s", "ours", ""] > 0
    for kind in ("ours", "released"):
        for load in ("4 sockets", "1 socket, sync"):
            assert measurements["client µs a step", kind, load] > 0


HEAVY = pytest.mark.heavy
WIRE = ["--only", "step,imports,clients"]


@pytest.mark.parametrize(
    ("name", "argv", "check"),
    [
        pytest.param("asynchrony", [], check_asynchrony, marks=HEAVY),
        pytest.param("cluster", [], check_cluster),
        pytest.param("concurrency", [], check_concurrency),
        pytest.param("connects", [], check_connects),
        pytest.param("controller", [], check_controller),
        pytest.param("forks", [], check_forks),
        pytest.param("mcp", [], check_mcp),
        pytest.param("seats", [], check_seats),
        pytest.param("vector", [], check_vector),
        pytest.param("weights", [], check_weights, marks=HEAVY),
        pytest.param("wire", WIRE, check_wire),
    ],
)
def test_quick_run_measures_everything(name: str, argv: list[str], check: Check, tmp_path: Path) -> None:
    check(quick_benchmark(name, tmp_path, *argv, timeout_s=500))


@pytest.mark.heavy
def test_published_run_compares_each_part_with_the_plain_side(tmp_path: Path) -> None:
    found = quick_benchmark("published", tmp_path, "--model", str(published_model()), timeout_s=500)
    rates = {key[1:]: median for key, median in medians(found).items()}
    ours = {("our trainer", "trainer"): "transformers", ("our engine", "engine"): "vLLM"}
    assert set(rates) == {*ours, *((plain, part) for (_, part), plain in ours.items())}
    ratios = [rates[key] / rates[plain, key[1]] for key, plain in ours.items()]
    assert [bar["value"] for bar in found["bars"]] == pytest.approx(ratios)


def test_sessions_that_wait_a_second_take_a_second(tmp_path: Path) -> None:
    argv = ["--only", "concurrency"]
    measurements = medians(quick_benchmark("wire", tmp_path, *argv, timeout_s=90))
    subject = {of for _, of, _ in measurements}
    assert subject == {"floor, waiting", "ours, waiting", "released, waiting"}
    for (metric, _, _), value in measurements.items():
        if metric.startswith("% succeed"):
            assert value == 100
        if metric.startswith(("p50 s", "p99 s")):
            assert value >= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the sandbox isolates nothing elsewhere")
def test_sandbox_run_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--quick", "--no-peers", "--levels", "lsm", "--json", str(out))
    process = run_module("benchmarks.sandbox", *options, cwd=ROOT, timeout_s=300)
    found = json.loads(out.read_text())
    if any(note.startswith("lsm: ") for note in found["notes"]):
        missing(f"needs the level lsm: {found['notes']}")
    assert process.returncode == 0, process.stderr + process.stdout
    assert found["notes"] == []
    measurements = {(row["figure"], row["load"]): row["median"] for row in found["figures"]}
    for what, load in (
        ("start", "nothing preloaded"),
        *product(("execute",), ("directly", "through the WebSocket")),
    ):
        assert 0 < measurements[f"{what} p50 ms", load] <= measurements[f"{what} p95 ms", load]
    assert measurements["inside / plain", ""] > 0
    load = "6 abandoned, 3 at once"
    assert [measurements[f"{kind} left", load] for kind in ("processes", "files", "descriptors")] == [0, 0, 0]
