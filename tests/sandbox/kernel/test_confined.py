"""Real processes behind real walls: what hostile code tries there fails, and what ordinary code does works."""

import contextlib
import errno
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
from typing import Any

import pytest

from openenv_core.sandbox import kernel
from openenv_core.sandbox.kernel import identity, landlock
from openenv_core.sandbox.kernel.syscalls import X86_64, current

PROGRAM = Path(__file__).parent / "confined_program.py"
DEADLINE_S = 60

NEEDS_LANDLOCK = pytest.mark.skipif(
    landlock.abi() < landlock.SIGNALS_SINCE, reason=f"needs Landlock 6 or newer, got {landlock.abi()}"
)
NEEDS_ROOT = pytest.mark.skipif(not identity.can_change_uid(), reason="needs the right to change uids")

REFUSED = {
    "inet_socket": "EPERM",
    "udp_socket": "EPERM",
    "netlink_socket": "EPERM",
    "vsock_socket": "EPERM",
    "unix_socket": "EPERM",
    "datagram_pair": "EPERM",
    "read_outside": "EACCES",
    "write_outside": "EACCES",
    "truncate_outside": "EACCES",
    "create_outside": "EACCES",
    "write_common": "EACCES",
    "chmod_outside": "EPERM",
    "chmod_common_by_descriptor": "EPERM",
    "chown_outside": "EPERM",
    "utime_outside": "EPERM",
    "setxattr_outside": errno.errorcode[errno.EOPNOTSUPP],
    "limit_of_parent": "EPERM",
    "kill_parent": "EPERM",
    "kill_all": "EPERM",
    "queue_signal_to_parent": "EPERM",
    "affinity_of_parent": "EPERM",
    "priority_of_parent": "EPERM",
    "pidfd_of_parent": "EPERM",
    "ptrace_parent": "EPERM",
    "memory_of_parent": "EPERM",
    "memfd": "EPERM",
    "shared_memory": "EPERM",
    "mount": "EPERM",
    "user_namespace": "EPERM",
    "new_mount_api": "EPERM",
    "io_uring": "EPERM",
    "bpf": "EPERM",
    "userfault": "EPERM",
    "keyring": "EPERM",
    "own_personality": "EPERM",
    "death_signal": "EPERM",
    "dumpable": "EPERM",
    "new_session": "EPERM",
    "fork": "EPERM",
    "subprocess_": "EPERM",
    "execve": "EPERM",
    "named_pipe": "EPERM",
    "steal_terminal_input": "EPERM",
    "pipe_size": "EPERM",
    "younger_call": "ENOSYS",
    "become_root": "EPERM",
    "another_filter": "EPERM",
}
WORKS = {
    "read_common": "done",
    "signal_oneself": "done",
    "threads": "done",
    "event_loop": "done",
    "temporary_files": "done",
    "copies": "done",
    "archives": "done",
    "database": "done",
    "memory_maps": "done",
    "randomness": "done",
    "pairs_and_pipes": "done",
}
HAS_NUMPY = importlib.util.find_spec("numpy") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
if HAS_NUMPY:
    WORKS["arrays"] = "done"


def open_python() -> str:
    """An interpreter that every user may run: the one of the tests, or the machine's."""
    for path in (sys.executable, "/usr/bin/python3"):
        code = "import sys; raise SystemExit(sys.version_info < (3, 11))"
        with contextlib.suppress(OSError):
            if (
                subprocess.run(
                    [path, "-I", "-c", code], user=65533, group=65533, capture_output=True
                ).returncode
                == 0
            ):
                return path
    pytest.skip("needs a Python 3.11 that every user may run")


def readable(*more: str) -> list[str]:
    paths = [
        sys.prefix,
        sys.base_prefix,
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/proc/cpuinfo",
        *more,
    ]
    return [path for path in paths if os.path.exists(path)]


def font_lists() -> list[Path]:
    """What matplotlib has found out about this machine's fonts, which takes it seconds."""
    return list(Path("~/.cache/matplotlib").expanduser().glob("fontlist-*.json"))


def run(python: str = sys.executable, **told: Any) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        sandbox = base / "sandbox"
        shutil.copytree(Path(kernel.__file__).parent, sandbox / "kernel")
        program = Path(shutil.copy(PROGRAM, sandbox))
        workspace, outside, common = base / "workspace", base / "outside", sandbox / "module.py"
        workspace.mkdir()
        for path in font_lists():
            shutil.copy(path, workspace)
        outside.write_text("a file of the server's")
        common.write_text("x = 1")
        told = {
            "sandbox": str(sandbox),
            "workspace": str(workspace),
            "outside": str(outside),
            "common": str(common),
            "readable": readable(str(sandbox)),
            **told,
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


def outcomes(policy: str, *, only: tuple[str, ...] = (), own_uid: bool = False) -> dict[str, str]:
    python, uid = sys.executable, None
    if own_uid:
        python, uid = open_python(), identity.session_uid(900)
    done = run(python, policy=policy, uid=uid, only=only)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def under_one_uid() -> dict[str, str]:
    return outcomes("plain", only=(*REFUSED, *WORKS))


@NEEDS_LANDLOCK
@pytest.mark.parametrize(("name", "expected"), [*REFUSED.items(), *WORKS.items()])
def test_under_the_uid_of_the_server(under_one_uid: dict[str, str], name: str, expected: str) -> None:
    assert under_one_uid[name] == expected


def test_every_attempt_is_expected_to_go_one_way() -> None:
    names = {line[4:].split("(")[0] for line in PROGRAM.read_text().split("@attempt\n")[1:]}
    assert names == {*REFUSED, *WORKS, "arrays", "figure", "copies_with_modes"}


@NEEDS_LANDLOCK
@pytest.mark.soak
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_a_figure_is_drawn_by_what_is_imported_behind_the_walls() -> None:
    assert outcomes("plain", only=("figure",)) == {"figure": "done"}


@NEEDS_LANDLOCK
def test_modes_cannot_be_set_where_files_of_the_server_have_the_same_uid() -> None:
    assert outcomes("plain", only=("copies_with_modes",)) == {"copies_with_modes": "EPERM"}


@NEEDS_LANDLOCK
@NEEDS_ROOT
def test_under_a_uid_of_its_own() -> None:
    # The machine's own interpreter may have no numpy.
    expected = REFUSED | WORKS | {"copies_with_modes": "done"}
    expected.pop("arrays", None)
    # The calls are allowed: what they meet is a file of another user.
    assert outcomes("plain", only=tuple(expected), own_uid=True) == expected


@NEEDS_LANDLOCK
def test_with_subprocesses() -> None:
    weaker = {"fork": "done", "subprocess_": "done", "execve": "ENOENT"}
    same = ("inet_socket", "kill_parent", "limit_of_parent", "memfd", "mount", "new_session", "write_outside")
    found = outcomes("subprocess", only=(*weaker, *same))
    assert found == weaker | {name: REFUSED[name] for name in same}


@NEEDS_LANDLOCK
def test_with_forks_alone() -> None:
    names = ("fork", "subprocess_", "execve", "inet_socket", "kill_parent", "threads", "new_session")
    expected = {**REFUSED, **WORKS, "fork": "done"}
    assert outcomes("fork", only=names) == {name: expected[name] for name in names}


@pytest.mark.skipif(current() is not X86_64, reason="x32 is a convention of x86-64")
def test_x32_calls_kill() -> None:
    done = run(policy="plain", killed_by=0x40000000 | 39)
    assert done.returncode == -signal.SIGSYS
