"""Two controllers in one run's folder would spoil it: the second one is refused."""

import errno
import fcntl
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_bridge.errors import RunInUseError
from rl_bridge.loops import folder_lock
from rl_bridge.loops.folder_lock import LOCK_FILE, folder_of_ones_own, is_unused


def require_free(folder: Path) -> None:
    with folder_of_ones_own(folder):
        pass


@pytest.mark.parametrize(
    ("left", "unused"),
    [
        ([], True),
        ([LOCK_FILE], True),
        ([LOCK_FILE, "config.yaml.partial"], True),
        ([LOCK_FILE, "config.yaml"], False),
        ([LOCK_FILE, "checkpoint"], False),
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
    assert is_unused(tmp_path) == unused


def test_second_comer_is_told_who_has_it_and_what_to_do(tmp_path: Path) -> None:
    with (
        folder_of_ones_own(tmp_path),
        pytest.raises(
            RunInUseError, match=rf"process {os.getpid()} on \S+ has it since \d{{4}}-.*Wait for its end"
        ),
    ):
        require_free(tmp_path)
    require_free(tmp_path)


def test_folder_is_free_as_soon_as_its_process_is_dead(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if (holder := os.fork()) == 0:
        try:
            with folder_of_ones_own(tmp_path):
                os.write(writing, b"!")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"!"
        with pytest.raises(RunInUseError, match=f"process {holder} "):
            require_free(tmp_path)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reading)
        os.close(writing)
    require_free(tmp_path)


def test_no_child_keeps_the_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with folder_of_ones_own(tmp_path):
        executed = subprocess.Popen(["sleep", "60"], close_fds=False)
        if (forked := os.fork()) == 0:
            try:
                os.write(writing, b"!")
                signal.pause()
            finally:
                os._exit(1)
    try:
        assert os.read(reading, 1) == b"!"
        require_free(tmp_path)
    finally:
        for child in (forked, executed.pid):
            os.kill(child, signal.SIGKILL)
        os.waitpid(forked, 0)
        executed.wait()
        os.close(reading)
        os.close(writing)


def test_child_that_comes_by_the_end_of_the_block_closes_nothing_of_its_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(folder_of_ones_own(tmp_path))
        (descriptor,) = folder_lock._OPEN
        if (forked := os.fork()) == 0:
            try:
                os.dup2(0, descriptor)  # the number is free there, and soon somebody else's
                stack.close()
                os.fstat(descriptor)
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0


def test_note_that_nobody_can_read_is_no_hindrance_to_saying_so(tmp_path: Path) -> None:
    with folder_of_ones_own(tmp_path):
        (tmp_path / LOCK_FILE).write_text("[1")
        with pytest.raises(RunInUseError, match="another process has it"):
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


def test_other_errors_are_the_folders_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        require_free(tmp_path)
