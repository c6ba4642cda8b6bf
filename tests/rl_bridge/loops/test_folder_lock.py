"""Two controllers in one run's folder would spoil it: the second one is refused."""

import errno
import fcntl
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_bridge.errors import RunInUseError
from rl_bridge.loops.folder_lock import LOCK_FILE, is_unused, lock_folder
from tests.rl_bridge.forked_child import forked_child


def require_free(folder: Path) -> None:
    with lock_folder(folder):
        pass


@pytest.mark.parametrize(
    ("left", "unused"),
    [
        ([], True),
        ([LOCK_FILE, "config.yaml.partial"], True),
        ([LOCK_FILE, "config.yaml"], False),
        (["somebody's thesis"], False),
    ],
)
def test_folder_is_unused_until_a_run_has_left_what_can_be_gone_on_with(
    tmp_path: Path, left: list[str], unused: bool
) -> None:
    assert is_unused(tmp_path / "absent")
    for name in left:
        (tmp_path / name).touch()
        assert not is_unused(tmp_path / name)  # a file is no folder
        assert is_unused(tmp_path / name / "absent")  # making it tells why it cannot be used
    assert is_unused(tmp_path) == unused


def test_second_process_learns_who_holds_the_folder_and_what_to_do(tmp_path: Path) -> None:
    held_by_us = rf"process {os.getpid()} on \S+ has it since \d{{4}}-.*Wait for its end"
    with lock_folder(tmp_path), pytest.raises(RunInUseError, match=held_by_us):
        require_free(tmp_path)
    require_free(tmp_path)


def test_folder_is_free_as_soon_as_its_process_is_dead(tmp_path: Path) -> None:
    def hold() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(lock_folder(tmp_path))
        return stack

    with forked_child(hold) as holder, pytest.raises(RunInUseError, match=f"process {holder} "):
        require_free(tmp_path)
    require_free(tmp_path)


def test_no_child_keeps_the_folder(tmp_path: Path) -> None:
    with ExitStack() as children:
        with lock_folder(tmp_path):
            executed = children.enter_context(subprocess.Popen(["sleep", "60"], close_fds=False))
            children.callback(executed.kill)
            children.enter_context(forked_child(lambda: True))
        require_free(tmp_path)


def test_folder_that_its_run_has_removed_is_not_locked_in_its_stead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (folder / LOCK_FILE).unlink()
        folder.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(FileNotFoundError):
        require_free(folder)


def test_file_system_without_locks_is_warned_of_once_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    require_free(tmp_path)
    (warning,) = caplog.messages
    assert "No locks available" in warning
