"""What a run is told when it cannot have the folder that it asks for."""

import errno
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
    with pytest.raises(ConfigError, match="expected a new folder"):
        train_run(config, tmp_path, resume=False)
    assert done.exists()
    with pytest.raises(ConfigError, match=r"subclass of rl_bridge\.rollout\.Task"):
        train_run(config, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()  # the name is free for the next attempt


def test_run_that_is_under_way_is_not_resumed_and_keeps_its_configuration(tmp_path: Path) -> None:
    from rl_bridge.config import CONFIG_FILE, Config
    from rl_bridge.errors import RunInUse
    from rl_bridge.loops.folder_lock import folder_of_ones_own
    from rl_bridge.loops.session import train_run

    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}})
    (tmp_path / CONFIG_FILE).write_text("the run's own")
    with folder_of_ones_own(tmp_path), pytest.raises(RunInUse, match="expected the run's folder"):
        train_run(config, tmp_path, resume=True)
    assert (tmp_path / CONFIG_FILE).read_text() == "the run's own"


def test_folder_that_cannot_be_written_to_leaves_the_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.config import Config
    from rl_bridge.errors import ConfigError
    from rl_bridge.loops import session

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "json:dumps"}})
    monkeypatch.setattr(session, "save_config", full)
    with pytest.raises(
        ConfigError, match=r"cannot write to .*: No space left on device; see that there is room"
    ):
        session.train_run(config, tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()
