"""The container benchmark runs and its bars follow from its metrics; their size is not asserted."""

import json
from pathlib import Path

import pytest
from module_run import run_module

from benchmarks.containers import BENCHMARK
from benchmarks.harness import Measurements
from openenv_core.providers.docker import DockerEngine

POOL = ("hand-out", "while others start")
ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.docker
@pytest.mark.timeout(400)
def test_quick_run_reports_every_metric_and_leaves_nothing(engine: DockerEngine, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--quick", "--image", "ropewalk-test-never-built:1", "--json", str(out)]
    done = run_module("benchmarks.containers", *arguments, cwd=ROOT, timeout_s=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    measurements = {(row["figure"], row["of"]): row["median"] for row in report["figures"]}
    assert set(measurements) == {
        ("cold s", "docker run"),
        ("cold s", "ours"),
        *((f"{how} {which} ms", "ours") for how in POOL for which in ("p50", "p95")),
    }
    assert all(value > 0 for value in measurements.values())
    assert all(measurements[f"{how} p50 ms", "ours"] <= measurements[f"{how} p95 ms", "ours"] for how in POOL)
    assert len(report["bars"]) == 2
    assert "ropewalk-test-never-built:1: the engine has no such image" in done.stdout
    containers = engine.call("GET", "/containers/json", query={"all": True})
    assert "/ropewalk-bench-" not in str([each["Names"] for each in containers])


def test_bars_are_computed_from_the_metrics() -> None:
    def measurements(ours: float, hand_out: float) -> Measurements:
        metrics = Measurements()
        for noise in (0.0, -0.1, 5.0):
            metrics.add("cold s", "docker run", "an image", 0.5 + noise)
            metrics.add("cold s", "ours", "an image", ours + noise)
        metrics.add("hand-out p50 ms", "ours", "an image", hand_out)
        return metrics

    assert [(bar.value, bar.met) for bar in BENCHMARK.bars(measurements(0.75, 20))] == [
        (1.5, True),
        (20, True),
    ]
    slow = measurements(1.0, 21)
    assert [bar.met for bar in BENCHMARK.bars(slow)] == [False, False]
    assert BENCHMARK.report(slow, list(BENCHMARK.bars(slow))).count("NOT met") == 2
    assert list(BENCHMARK.bars(Measurements())) == []
