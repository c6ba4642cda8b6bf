"""Where the figures of a run go, and what a person sees of them."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from rl_bridge.metrics import JsonlSink, MetricsLog
from rl_bridge.metrics.console import ProgressBar, iteration_line


class ListSink:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0

    def write(self, iteration: int, figures: Mapping[str, float]) -> None:
        self.rows.append((iteration, figures))

    def close(self) -> None:
        self.closed += 1


def test_every_sink_gets_everything_and_is_closed_after_a_failure() -> None:
    sinks = [ListSink(), ListSink()]

    def fail() -> None:
        with MetricsLog(sinks) as log:
            log.write(1, {"reward/mean": 0.5})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [(sink.rows, sink.closed) for sink in sinks] == [([(1, {"reward/mean": 0.5})], 1)] * 2


def test_json_lines_are_there_at_once_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    first.write(1, {"reward/mean": 0.1})
    # Read before closing: a run that is killed keeps what it has measured.
    assert json.loads(path.read_text()) == {"iteration": 1, "reward/mean": 0.1}
    first.close()
    second = JsonlSink(path)
    second.write(2, {"reward/mean": 0.2})
    second.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("failed", "retried", "told"), [(0.0, 0.0, ""), (0.125, 31.0, "  failed 12.5%  retried 31")]
)
def test_the_line_of_an_iteration(failed: float, retried: float, told: str) -> None:
    line = iteration_line(
        7,
        150,
        {
            "reward/mean": -0.2512,
            "rollout/ending/illegal_answer": 0.0312,
            "rollout/ending/failed_environment": failed,
            "rollout/episodes_retried": retried,
            "mismatch/logprob_max": 3e-6,
            "probe/exact_return": -0.0512,
            "something/else": 1.0,
        },
        remaining_s=125.4,
    )
    assert line == (
        f"   7/150  reward -0.251  illegal 3.1%{told}  mismatch 3e-06  exact_return -0.0512  2:05 left"
    )


def test_progress_without_a_terminal_is_a_line_a_tenth() -> None:
    text = io.StringIO()
    with ProgressBar("hands", 2000, Console(file=text, width=100)) as bar:
        for done in range(1, 2001):
            bar.update(done)
    assert text.getvalue().splitlines() == [f"hands: {done:,} of 2,000" for done in range(200, 2001, 200)]
