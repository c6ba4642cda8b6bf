"""The line that a run prints for each iteration."""

import pytest

from rl_bridge.metrics.sinks import format_iteration


@pytest.mark.parametrize(
    ("failed", "retried", "failures"), [(0.0, 0.0, ""), (0.125, 31.0, "  failed 12.5%  retried 31")]
)
def test_the_line_of_an_iteration(failed: float, retried: float, failures: str) -> None:
    line = format_iteration(
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
        f"   7/150  reward -0.251  illegal 3.1%{failures}  mismatch 3e-06  exact_return -0.0512  2:05 left"
    )
