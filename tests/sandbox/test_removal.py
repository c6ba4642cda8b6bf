"""Removing files while something changes them, simulated at the worst moment."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv_core.sandbox.workspace import remove_below


@pytest.fixture
def work(tmp_path: Path) -> Path:
    inner = tmp_path / "work" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    return tmp_path / "work"


@pytest.fixture
def folder(work: Path) -> Iterator[int]:
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("name", ["outer", "inner"])
@pytest.mark.parametrize("call", ["open", "chmod"])
def test_folder_replaced_by_a_link_leaves_the_target_unchanged(
    work: Path, folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    goal = tmp_path / "goal"
    goal.mkdir()
    goal.chmod(0o750)
    (goal / "kept").touch()
    change, exchanged = getattr(os, call), []

    def exchange_before(path: Any, mode: int, *, dir_fd: int | None = None) -> Any:
        here = Path(os.readlink(path) if str(path).startswith("/proc/self/fd/") else path)
        if here.name == name and not exchanged:
            place = next(work.rglob(name))
            place.rename(work / "aside")
            place.symlink_to(goal)
            exchanged.append(place)
        return change(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, call, exchange_before)
    remove_below(folder, None)
    assert exchanged
    assert goal.stat().st_mode & 0o777 == 0o750
    assert (goal / "kept").exists()
    assert list(work.iterdir()) == []


def test_removal_is_bounded_when_files_keep_appearing(
    work: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, numbers = os.unlink, itertools.count()

    def make_another(path: str, *, dir_fd: int) -> None:
        remove(path, dir_fd=dir_fd)
        number = next(numbers)
        assert number < 1000, "this would have no end"
        (work / f"another-{number}").touch()

    monkeypatch.setattr(os, "unlink", make_another)
    with pytest.raises(OSError, match="after 50 rounds"):
        remove_below(folder, None, 50)


def test_failed_removal_is_reported_and_the_rest_removed(
    work: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.unlink
    (work / "stays").touch()

    def refuse(path: str, *, dir_fd: int) -> None:
        if path == "stays":
            raise PermissionError(1, "Operation not permitted")
        remove(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        remove_below(folder, str(work))
    assert [path.name for path in work.iterdir()] == ["stays"]
