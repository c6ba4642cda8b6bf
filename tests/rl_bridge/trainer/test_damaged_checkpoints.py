"""A checkpoint that cannot be read is set aside, and the one before is gone on from, with all that belongs to it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import ModelError
from rl_bridge.trainer.settings import ResumeState


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"groups of 4", b"groups of 5"))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Any]:
    """Those of iterations 2 and 4, of a model that is one tensor with the number of the iteration."""
    import torch

    from rl_bridge.titan.ranks import join_process_group
    from rl_bridge.trainer.checkpoints import Checkpoints

    join_process_group(torch.device("cpu"))
    made = Checkpoints(tmp_path, timeout_s=60.0)
    for version in (2, 4):
        state = {"model": {"w": torch.full((1000,), float(version))}}
        made.save(version, state, {"at": version}, {"groups": f"groups of {version}".encode()})
        made.finish()
    yield made
    made.close()


def read(checkpoints: Any, version: int) -> tuple[float, ResumeState]:
    import torch

    state = {"model": {"w": torch.zeros(1000)}}
    run_state = checkpoints.run_state(version)
    checkpoints.load(version, state)
    return state["model"]["w"].mean().item(), run_state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("run.json", truncate),
        ("attachments/groups", Path.unlink),
        ("attachments/groups", flip),
        (".metadata", truncate),
        ("__0_0.distcp", truncate),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    checkpoints: Any, tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    (tmp_path / "checkpoint" / "step-4.damaged" / "left").mkdir(parents=True)  # of another time
    damage(tmp_path / "checkpoint" / "step-4" / part)
    (weight, stored), damaged = checkpoints.newest(lambda version: read(checkpoints, version))
    assert weight == 2.0
    assert stored == ResumeState(version=2, run_state={"at": 2}, attachments={"groups": b"groups of 2"})
    assert names(tmp_path) == ["step-2", "step-4.damaged"]
    assert len(damaged) == 1
    assert "step-4': " in damaged[0]
    assert "set aside as step-4.damaged, going on from the one before" in damaged[0]
    assert checkpoints.newest(lambda version: version) == (2, ())


def test_checkpoint_unreadable_on_one_rank_is_damaged_for_all(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.trainer import checkpoints as module

    others = iter(["a stale file handle"])
    monkeypatch.setattr(module, "agree", lambda failure: failure or next(others, None))
    (weight, stored), damaged = checkpoints.newest(lambda version: read(checkpoints, version))
    assert (weight, stored.version, "a stale file handle" in damaged[0]) == (2.0, 2, True)


def test_run_ends_and_keeps_all_if_no_checkpoint_can_be_read(checkpoints: Any, tmp_path: Path) -> None:
    for version in (2, 4):
        truncate(tmp_path / "checkpoint" / f"step-{version}" / "run.json")
    with pytest.raises(ModelError, match=r"from any checkpoint of the run: .*step-4.*step-2.*begins anew"):
        checkpoints.newest(lambda version: read(checkpoints, version))
    assert names(tmp_path) == ["step-2", "step-4"]


def test_configuration_errors_are_no_checkpoint_damage(checkpoints: Any, tmp_path: Path) -> None:
    def refuse(version: int) -> None:
        raise ModelError(f"other adapters in {version}")

    with pytest.raises(ModelError, match=r"^other adapters in 4$"):
        checkpoints.newest(refuse)
    assert names(tmp_path) == ["step-2", "step-4"]
