"""Which checkpoint a run goes on from, and what it is told when that cannot be."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy  # the session imports Monarch


def test_a_checkpoint_counts_once_it_is_whole(tmp_path: Path) -> None:
    from rl_bridge.loops.session import newest_checkpoint

    assert newest_checkpoint(tmp_path) == 0
    for step in (4, 20, 100):
        (tmp_path / "checkpoint" / f"step-{step}").mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 0
    for step in (4, 20):
        (tmp_path / "checkpoint" / f"step-{step}" / ".metadata").touch()
    assert newest_checkpoint(tmp_path) == 20


def test_fewer_iterations_than_trained_and_a_taken_folder_are_refused(tmp_path: Path) -> None:
    from rl_bridge.config import Config
    from rl_bridge.errors import ConfigError
    from rl_bridge.loops.session import train_run

    config = Config.model_validate(
        {"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}, "trainer": {"iterations": 3}}
    )
    done = tmp_path / "checkpoint" / "step-4"
    done.mkdir(parents=True)
    (done / ".metadata").touch()
    with pytest.raises(ConfigError, match="at least 4"):
        train_run(config, tmp_path, resume=True)
    with pytest.raises(ConfigError, match="cannot write to the run's folder"):
        train_run(config, tmp_path, resume=False)
    assert done.exists()
    with pytest.raises(ConfigError, match=r"subclass of rl_bridge\.rollout\.Task"):
        train_run(config, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()  # the name is free for the next attempt
