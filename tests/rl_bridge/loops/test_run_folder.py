"""What a run is told when it cannot have the folder that it asks for."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy  # the session imports Monarch


def test_fewer_iterations_than_trained_and_a_taken_folder_are_refused(tmp_path: Path) -> None:
    from rl_bridge.config import Config
    from rl_bridge.errors import ConfigError
    from rl_bridge.loops.session import train_run

    config = Config.model_validate(
        {"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}, "trainer": {"iterations": 3}}
    )
    done = tmp_path / "checkpoint" / "step-4"
    done.mkdir(parents=True)
    with pytest.raises(ConfigError, match="at least 4"):
        train_run(config, tmp_path, resume=True)
    with pytest.raises(ConfigError, match="cannot write to the run's folder"):
        train_run(config, tmp_path, resume=False)
    assert done.exists()
    with pytest.raises(ConfigError, match=r"subclass of rl_bridge\.rollout\.Task"):
        train_run(config, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()  # the name is free for the next attempt
