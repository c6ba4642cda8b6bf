"""A run in simulated time, by the loop, dispatcher and buffer of training."""

from pathlib import Path

import pytest

from benchmarks.cluster import SESSIONS, STEP, Cluster, Plan, run
from benchmarks.simulated_time import simulate


@pytest.mark.parametrize("uneven", [False, True])
def test_sessions_play_as_many_episodes_as_admission_lets(uneven: bool, tmp_path: Path) -> None:
    """Also with episodes ten times as long as others, and workers lost with their host for a while."""
    cluster = Cluster(plan=Plan(iterations=9, groups_per_gpu=2), gpus=20, uneven=uneven, seed=1)
    figures = simulate(run(cluster, tmp_path))
    assert figures[SESSIONS] >= 0.9
    assert figures[STEP] >= 0.99 * cluster.train_s
