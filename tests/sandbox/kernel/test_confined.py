"""Real processes behind real walls: what hostile code tries there fails, and what ordinary code does works."""

import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked import open_python

from openenv_core.sandbox import kernel
from openenv_core.sandbox.kernel import identity, landlock
from openenv_core.sandbox.kernel.syscalls import X86_64, current

PROGRAM = Path(__file__).parent / "confined_program.py"
DEADLINE_S = 60
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/cpuinfo")

NEEDS_LANDLOCK = pytest.mark.skipif(
    landlock.abi() < landlock.SIGNALS_SINCE, reason=f"needs Landlock 6 or newer, got {landlock.abi()}"
)
NEEDS_ROOT = pytest.mark.skipif(identity.session_uid(0) is None, reason="needs the right to change uids")
ABSENT = ("arrays",) if importlib.util.find_spec("numpy") is None else ()


def run(
    policy: str,
    *only: str,
    python: str = sys.executable,
    uid: int | None = None,
    without: tuple[str, ...] = ("figure", *ABSENT),
    killed_by: int = 0,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        sandbox = base / "sandbox"
        shutil.copytree(Path(kernel.__file__).parent, sandbox / "kernel")
        program = Path(shutil.copy(PROGRAM, sandbox))
        workspace, outside, common = base / "workspace", base / "outside", sandbox / "module.py"
        workspace.mkdir()
        # What matplotlib has found out about this machine's fonts, which takes it seconds.
        for path in Path("~/.cache/matplotlib").expanduser().glob("fontlist-*.json"):
            shutil.copy(path, workspace)
        outside.write_text("a file of the server's")
        common.write_text("x = 1")
        told = {
            "sandbox": str(sandbox),
            "workspace": str(workspace),
            "outside": str(outside),
            "common": str(common),
            "readable": [
                path for path in (sys.prefix, sys.base_prefix, *SYSTEM, str(sandbox)) if os.path.exists(path)
            ],
            "policy": policy,
            "uid": uid,
            "only": only,
            "without": without,
            "killed_by": killed_by,
        }
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (outside, common)]
        done = subprocess.run(
            [python, "-I", "-B", str(program), json.dumps(told)],
            env={"OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            start_new_session=True,
        )
        assert outside.read_text() == "a file of the server's"
        assert common.read_text() == "x = 1"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (outside, common)] == modes
        return done


def outcomes(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What was expected of each attempt, and what became of it."""
    assert done.returncode == 0, done.stderr
    both = json.loads(done.stdout)
    return {name: pair[0] for name, pair in both.items()}, {name: pair[1] for name, pair in both.items()}


@NEEDS_LANDLOCK
def test_under_the_uid_of_the_server() -> None:
    expected, found = outcomes(run("plain"))
    assert found == expected
    assert len(found) >= 55
    assert found["copy_with_modes"] == "EPERM"


@NEEDS_LANDLOCK
@NEEDS_ROOT
def test_under_a_uid_of_its_own() -> None:
    # The machine's own interpreter may have no numpy. The calls are allowed: what they meet is another user's file.
    uid = identity.session_uid(900)
    expected, found = outcomes(run("plain", python=open_python(65533), uid=uid, without=("figure", "arrays")))
    assert found == expected
    assert found["copy_with_modes"] == "done"


@NEEDS_LANDLOCK
@pytest.mark.parametrize(
    ("policy", "weaker"),
    [
        ("subprocess", {"fork": "done", "subprocess": "done", "execve": "ENOENT"}),
        ("fork", {"fork": "done", "subprocess": "EPERM", "execve": "EPERM"}),
    ],
)
def test_policies_that_allow_more_processes_allow_nothing_else(policy: str, weaker: dict[str, str]) -> None:
    same = ("inet_socket", "kill_parent", "limit_of_parent", "memfd", "mount", "new_session", "write_outside")
    expected, found = outcomes(run(policy, *same, "threads_and_event_loop", *weaker))
    assert found == expected | weaker


@NEEDS_LANDLOCK
@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_figure_is_drawn_by_what_is_imported_behind_the_walls() -> None:
    assert outcomes(run("plain", "figure"))[1] == {"figure": "done"}


@pytest.mark.skipif(current() is not X86_64, reason="x32 is a convention of x86-64")
def test_x32_calls_kill() -> None:
    assert run("plain", killed_by=0x40000000 | 39).returncode == -signal.SIGSYS
