"""The benchmark of the wire runs, and its figures add up. How large they are is nobody's business here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wire.bars import bars
from benchmarks.wire.figures import Figures
from benchmarks.wire.frames import DEFLATED, PING, TEXT, deflated, masked, split
from benchmarks.wire.plan import ONE_CORE
from benchmarks.wire.report import report

ROOT = Path(__file__).parents[2]


def wire(*words: str, timeout_s: float = 90) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.wire", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def figures_of(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """By whom and under which load: every figure's median."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(path.read_text())["figures"]:
        found.setdefault((row["of"], row["load"]), {})[row["figure"]] = row["median"]
    return found


@pytest.mark.soak
def test_the_figures_of_a_quick_run_add_up(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = wire("--quick", "--no-released", "--only", "step,imports,clients", "--json", str(out))
    assert done.returncode == 0, done.stderr
    figures = figures_of(out)
    for who in ("floor", "ours, inline", "ours, asynchronous", "ours, blocking"):
        seen = figures[who, f"8 sessions, {ONE_CORE}"]
        # A server on one core cannot use more CPU than there is time.
        assert 0 < seen["steps/s"] * seen["server µs a step"] <= 1.05e6
        # Eight steps at a time are under way.
        assert 0 < seen["p50 ms"] <= seen["p99 ms"]
        assert seen["steps/s"] * seen["p50 ms"] / 1e3 <= 2 * 8
        assert 0 < figures[who, ""]["start s"] < 60
        assert figures[who, "32 idle"]["kB a session"] > 0
    assert figures["ours", ""]["import s"] > 0
    for kind in ("ours", "ours-typed"):
        assert figures[kind, "4 sockets"]["client µs a step"] > 0
        assert figures[kind, "1 socket, sync"]["client µs a step"] > 0
    assert "| ours, inline" in done.stdout
    assert json.loads(out.read_text())["notes"] == []


@pytest.mark.soak
def test_sessions_that_wait_a_second_take_a_second(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = wire(
        "--quick", "--only", "concurrency", "--released-python", "/nowhere/python", "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    assert "going on without the released package" in done.stderr
    assert "/nowhere/python" in done.stdout
    figures = figures_of(out)
    assert {who for who, _ in figures} == {"floor, waiting", "ours, waiting"}
    for seen in figures.values():
        assert seen["% succeed"] == seen["% succeed at once"] == 100
        assert 1.0 <= seen["p50 s"] <= seen["p99 s"]
        assert 1.0 <= seen["p50 s at once"] <= seen["p99 s at once"]
        assert seen["kB a connection"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "steps"], "expected some of step, clients, imports, concurrency, got 'steps'"),
        (["--rounds", "0"], "expected a number of at least 1, got '0'"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], said: str) -> None:
    done = wire(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_bars_are_worked_out_from_the_figures() -> None:
    def figures(ours: float) -> Figures:
        made = Figures()
        values: dict[str, float] = {"floor": 20, "ours, inline": ours, "released, sync": 100}
        for who, value in values.items():
            for noise in (0, -5, 400):
                made.add("server µs a step", who, f"64 sessions, {ONE_CORE}", value + noise)
        return made

    assert [(bar.value, bar.met) for bar in bars(figures(25))] == [(1.25, True), (4.0, True)]
    assert [(bar.value, bar.met) for bar in bars(figures(40))] == [(2.0, False), (2.5, False)]
    assert report(figures(40), bars(figures(40))).count("NOT met") == 2
    assert bars(Figures()) == []


def unmasked(frame: bytes) -> bytes:
    """What a server gets out of a client's frame, as the frame that a server would send."""
    size, begin = frame[1] & 0x7F, 2
    if size == 126:
        begin = 4
    key, body = frame[begin : begin + 4], frame[begin + 4 :]
    return frame[:1] + bytes([size]) + frame[2:begin] + bytes(b ^ key[i % 4] for i, b in enumerate(body))


@pytest.mark.parametrize("size", [0, 1, 125, 126, 200, 65_535])
def test_frames_are_cut_wherever_they_break(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    stream = unmasked(masked(payload)) + unmasked(masked(b"ping", PING))
    for at in (0, 1, 2, 3, 5, len(stream) - 7, len(stream) - 1):
        first, rest = split(stream[:at])
        second, rest = split(rest + stream[at:])
        assert [*first, *second] == [(TEXT, payload), (PING, b"ping")]
        assert rest == b""


def test_a_compressed_frame_can_be_sent_again_and_again() -> None:
    import zlib

    inflate: Any = zlib.decompressobj(wbits=-15)
    frames, _ = split(unmasked(deflated(b"the same again")) * 3)
    for opcode, payload in frames:
        assert opcode == DEFLATED
        assert inflate.decompress(payload + b"\x00\x00\xff\xff") == b"the same again"
