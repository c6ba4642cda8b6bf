"""The benchmark of the sandbox runs, and its figures add up. How large they are is nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from missing import missing

from benchmarks.sandbox.__main__ import main
from benchmarks.sandbox.peers import no_engine, no_jupyter
from benchmarks.sandbox.report import bars, ratios, report
from benchmarks.wire.figures import Figures

ROOT = Path(__file__).parents[2]


def sandbox(*words: str, timeout_s: float = 300) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.sandbox", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.soak
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: the sandbox has no level of isolation elsewhere"
)
def test_the_figures_of_a_quick_run_add_up(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = sandbox("--quick", "--no-peers", "--levels", "lsm", "--json", str(out))
    found = json.loads(out.read_text())
    if any(note.startswith("lsm: ") for note in found["notes"]):
        missing(f"needs the level lsm: {found['notes']}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert found["notes"] == []
    figures = {(row["figure"], row["load"]): row["median"] for row in found["figures"]}
    assert 0 < figures["start p50 ms", "nothing preloaded"] <= figures["start p95 ms", "nothing preloaded"]
    assert figures["CPU ms", "nothing preloaded"] > 0
    for load in ("directly", "through the WebSocket"):
        assert 0 < figures["execute p50 ms", load] <= figures["execute p95 ms", load]
        assert figures["CPU µs", load] > 0
    assert figures["executions/s", "2 sessions at once"] > 0
    assert figures["MB a session", "4 live, nothing preloaded"] > 0
    inside, plain = (figures[f"{who} µs a turn", ""] for who in ("inside", "plain python"))
    assert figures["inside / plain", ""] == pytest.approx(inside / plain)
    load = "6 abandoned, 3 at once"
    assert figures["reclaimed s", load] > 0
    assert [figures[f"{what} left", load] for what in ("processes", "files", "descriptors")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "starts"], "expected some of start, execute"),
        (["--levels", "root"], "expected some of namespaces, lsm, seccomp, process, got 'root'"),
        (["--live", "0"], "expected a number of at least 1, got '0'"),
        (["--preload", "os;evil"], "expected names of modules, got 'os;evil'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_is_missing_is_told_with_the_remedy() -> None:
    why = no_jupyter(Path("/nowhere/bin/python"))
    assert why is not None
    assert "/nowhere/bin/python" in why
    assert "--jupyter-python" in why
    why = no_engine("no/such/image:at-all")
    assert why is not None
    assert "scripts/docker-engine start" in why


def test_bars_are_worked_out_from_the_figures() -> None:
    made = Figures()
    for value in (14, 900, 3):
        made.add("start p50 ms", "lsm", "numpy preloaded", value)
    made.add("start p50 ms", "namespaces", "numpy preloaded", 31)
    made.add("start p50 ms", "Jupyter kernel", "", 700)
    made.add("execute p50 ms", "lsm", "directly", 40)
    made.add("execute p50 ms", "lsm", "through the WebSocket", 0.5)
    made.add("MB a session", "lsm", "500 live", 5.5)
    made.add("server kB a session", "lsm", "500 live", 4)
    made.add("MB a session", "Jupyter kernel", "one", 40)
    made.add("inside / plain", "lsm", "", 1.02)
    for name, left in (("processes left", 0), ("files left", 2), ("descriptors left", 0)):
        made.add(name, "lsm", "9 abandoned", left)
    held = list(bars(made))
    assert [(bar.value, bar.met) for bar in held] == [
        (31, False),
        (14, True),
        (0.5, True),
        (5.5, False),
        (1.02, True),
        (2, False),
    ]
    assert dict(ratios(made)) == {
        "start: Jupyter kernel / lsm, numpy preloaded": "50",
        "start: Jupyter kernel / namespaces, numpy preloaded": "23",
    }
    assert report(made, held).count("NOT met") == 3
    assert list(bars(Figures())) == []
