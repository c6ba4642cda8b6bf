"""Limits, levels, answers, outputs and scratch folders: the parts that need no interpreter."""

import fcntl
import json
import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from living import UNPROTECTED

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    Isolation,
    Limits,
    LimitsError,
    Sandbox,
    SandboxConfig,
    SandboxUnavailableError,
    workspace,
)
from openenv_core.sandbox.answers import (
    AnswerReader,
    Exit,
    ForgedAnswerError,
    finalize_execution,
    truncate_execution,
)
from openenv_core.sandbox.inside import interpreter as interrupts
from openenv_core.sandbox.inside.frames import pack_answer
from openenv_core.sandbox.inside.interpreter import FRAME
from openenv_core.sandbox.inside.walls import tolerate_copy_errors
from openenv_core.sandbox.probes import prove
from openenv_core.sandbox.readable import find_readable, without_hidden
from openenv_core.sandbox.results import Execution, Output
from openenv_core.sandbox.workspace import PREFIX, Scratch, Workspace, sweep

HEADER: dict[str, Any] = {
    "id": 1,
    "status": "ok",
    "exit_code": 0,
    "text": True,
    "outputs": [["display_data", ["text/plain", "image/png"]]],
    "truncated": False,
    "count": 3,
    "max_rss": 4,
}
LADDER = (Isolation.PROCESS, Isolation.SECCOMP, Isolation.LSM, Isolation.NAMESPACES)
TEXTS = ["result", "plain", "cG5n"]


def test_invalid_limits_are_refused() -> None:
    numbers = [("timeout_s", 0), ("timeout_s", float("inf")), ("memory_bytes", 1.5), ("memory_bytes", True)]
    for name, value in (*numbers, ("allow_subprocess", 1), ("speed", 1)):
        with pytest.raises(LimitsError, match=name):
            Limits().changed({name: value})


def test_limits_stay_below_their_ceilings() -> None:
    ceilings = Limits(timeout_s=20.0)
    assert Limits().changed({"timeout_s": 20}).within(ceilings).timeout_s == 20
    with pytest.raises(LimitsError, match=r"at most 20\.0 for the limit timeout_s, got 21"):
        Limits(timeout_s=21).within(ceilings)
    with pytest.raises(LimitsError, match="allow_subprocess"):
        Limits(allow_subprocess=True).within(ceilings)


def test_a_minimum_above_the_strongest_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at or above the minimum"):
        SandboxConfig(strongest=Isolation.SECCOMP, minimum=Isolation.LSM)
    assert [level.at_least(Isolation.LSM) for level in LADDER] == [False, False, True, True]
    with pytest.raises(ConfigurationError, match="names of modules"):
        SandboxConfig(preload=("os; print()",))


def test_status_follows_from_how_the_process_ended() -> None:
    for how, status, code in (
        (Exit(code=3), "killed", 3),
        (Exit(signal=signal.SIGKILL), "killed", 137),
        (Exit(signal=signal.SIGKILL, memory=True), "memory", 137),
        (Exit(signal=signal.SIGKILL, memory=True, zygote=True), "sandbox_error", -1),
    ):
        judged = finalize_execution(Execution(status="ok"), None, how, Limits())
        assert (judged.status, judged.exit_code, judged.state_lost) == (status, code, True)


def test_result_and_displays_share_one_limit() -> None:
    display = Output(output_type="display_data", data={"text/plain": "x" * 1500})
    execution = Execution(status="ok", outputs=(display,))
    for length, retained in ((500, (display,)), (1500, ())):
        done = truncate_execution(
            (execution, b"y" * length), ("", False), ("", False), Limits(outputs_bytes=1024)
        )
        assert (done.result, done.outputs) == ("y" * length, retained)
        assert done.cut.outputs == (not retained)


def test_answer_is_read_in_any_fragmentation() -> None:
    data = pack_answer(HEADER, TEXTS)
    for size in (1, 7, len(data)):
        reader = AnswerReader(1000)
        answers = [reader.feed(data[at : at + size], 1) for at in range(0, len(data), size)]
        assert answers[:-1] == [None] * (len(answers) - 1)
        assert answers[-1] is not None
        assert answers[-1][1] == b"result"
        assert answers[-1][0].outputs[0].data == {"text/plain": "plain", "image/png": "cG5n"}


LIES: list[dict[str, Any]] = [
    {"id": 0},
    {"id": 2},
    {"id": "1"},
    {"status": "timeout"},
    {"status": ["ok"]},
    {"status": None},
    {"exit_code": -1},
    {"exit_code": 256},
    {"exit_code": "0"},
    {"text": 1},
    {"count": "3"},
    {"count": True},
    {"max_rss": 1 << 60},
    {"outputs": [["display_data", ["text/plain"]]]},
    {"outputs": [["display_data", ["a", "b", "c"]]]},
    {"outputs": [["stream", ["a", "b"]]]},
    {"outputs": {}},
    {"error": {"ename": 1, "evalue": "", "traceback": []}},
    {"error": "error"},
]
LYING_LENGTHS = [
    json.dumps({**HEADER, "lengths": lie}).encode() for lie in ([3, -1, 1], [1, 1, 0], [1, 1, 9], 3)
]
FORGED = [
    *(pack_answer({**HEADER, **lie}, TEXTS) for lie in LIES),
    pack_answer(HEADER, [*TEXTS, "one more"]),
    *(FRAME.pack(len(head), 3) + head + b"abc" for head in LYING_LENGTHS),
    FRAME.pack(5, 0) + b"[1,2]",
    FRAME.pack(2, 0) + b"\xff\xff",
    FRAME.pack(0xFFFFFFFF, 0),
    FRAME.pack(1, 0xFFFFFFFF),
    FRAME.pack(100_000, 0) + b"[" * 100_000,
    pack_answer(HEADER, TEXTS) + b"x",
]


def test_forged_answers_are_refused() -> None:
    for data in FORGED:
        with pytest.raises(ForgedAnswerError):
            AnswerReader(1000).feed(data, 1)
    with pytest.raises(ForgedAnswerError, match="without a request"):
        AnswerReader(1000).feed(b"x", None)


def test_hidden_paths_are_in_no_readable_folder(tmp_path: Path) -> None:
    for name in ("lib/python/site/secret/tests", "lib/python/site/numpy", "lib/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/link").symlink_to(tmp_path / "lib/python/site/secret")
    site = tmp_path / "lib/python/site"
    (tmp_path / "venv").symlink_to(tmp_path / "lib")
    for folder in ("lib", "venv"):
        left = without_hidden([str(tmp_path / folder)], [str(site / "secret")])
        assert sorted(left) == [str(tmp_path / "lib/other"), str(site / "numpy")]


def test_project_is_hidden_and_python_is_readable() -> None:
    visible, hidden = find_readable()
    readable = without_hidden(visible, hidden)
    assert not [path for path in readable if Path(path).name in ("openenv_core", "servers", "envs")]
    assert any(os.__file__.startswith(path + os.sep) for path in visible)


def test_packages_beneath_a_virtual_environment_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / f"lib/python{sysconfig.get_python_version()}/site-packages/code_interpreter_env"
    below.mkdir(parents=True)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    assert str(below) in find_readable()[1]


def test_only_folders_of_killed_owners_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = Scratch()
    with (living.path / ".lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "1" / "deep").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    sweep()
    assert not dead.exists()
    assert living.path.exists()
    assert (elsewhere / "kept").exists()
    living.close()
    living.close()
    assert not living.path.exists()


def test_folder_that_is_being_made_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = workspace._locked

    def sweep_first(path: Path) -> int | None:  # as another process that starts at the same time
        monkeypatch.setattr(workspace, "_locked", lock)
        sweep()
        return lock(path)

    monkeypatch.setattr(workspace, "_locked", sweep_first)
    scratch = Scratch()
    assert scratch.path.exists()
    scratch.close()
    assert list(tmp_path.iterdir()) == []


async def test_probe_refuses_a_level_that_does_not_hold() -> None:
    async with Sandbox(UNPROTECTED) as sandbox:
        with pytest.raises(SandboxUnavailableError, match=r"got through: opens a socket, .*, reads outside"):
            await prove(Isolation.LSM, sandbox.open)


async def test_concurrent_walks_see_all_files(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    names = {f"{number:0200}" for number in range(400)}  # more than the kernel lists at once
    for name in names:
        (place / name).touch()
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    workspace = Workspace(folder, Limits(), None, bounded=False, path=str(place))
    first = workspace._walk(include_all=True)
    paths = [next(first)[0]]
    assert {info.path for info in workspace.list()} == names
    paths += [path for path, _ in first]
    assert len(paths) == len(names)
    assert set(paths) == names
    await workspace.close()
    assert not place.exists()


def test_copying_tolerates_forbidden_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    monkeypatch.setattr("shutil.copymode", refuse)
    monkeypatch.setattr("shutil.copystat", refuse)
    (tmp_path / "a").write_text("x")
    with pytest.raises(PermissionError):
        shutil.copy(tmp_path / "a", tmp_path / "b")
    tolerate_copy_errors()
    shutil.copy(tmp_path / "a", tmp_path / "b")
    shutil.copy2(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "x"
    with pytest.raises(FileNotFoundError):
        shutil.copy(tmp_path / "none", tmp_path / "d")


@pytest.mark.parametrize("moment", range(2))
def test_own_signal_handler_survives_an_interrupt_at_any_moment(
    monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """No signal is sent: the installed handler is called just before the next change of handlers."""
    installed: list[Any] = [None]
    due = [False, False]

    def install(number: int, handler: Any) -> None:
        if number == signal.SIGINT:
            if due and due.pop(0):
                installed[0]()
            installed[0] = handler

    def handle(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(interrupts, "_set_handler", install)
    monkeypatch.setattr(interrupts, "_get_handler", lambda _: installed[0])
    theirs = interrupts.Interrupts()
    theirs.install()
    theirs.begin()
    installed[0] = handle
    theirs.end()
    due[:] = [moment == 0, moment == 1]
    try:
        try:
            theirs.begin()
        finally:
            theirs.end()
    except (SystemExit, KeyboardInterrupt):
        theirs.end()
    theirs.begin()
    assert installed[0] is handle
