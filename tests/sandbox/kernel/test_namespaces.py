"""Real namespaces and bind mounts: as root, as an unprivileged user, and where they are denied."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreters import open_python

from openenv_core.sandbox import kernel
from openenv_core.sandbox.kernel.identity import session_uid

PROGRAM = Path(__file__).parent / "namespaces_program.py"
DEADLINE_S = 60
SIZE_BYTES, INODES = 1 << 20, 64
SOMEBODY = 65_123


# Beneath /tmp, which is a link into the workspace where nothing of the view lies beneath it; and elsewhere.
@pytest.fixture(scope="module", params=["/var/tmp", "/tmp"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Files that the new root shows and hides, below a private home."""
    with tempfile.TemporaryDirectory(dir=request.param) as name:
        base = Path(name)
        sandbox = base / "home" / "sandbox"
        (sandbox / "secrets").mkdir(parents=True)
        (sandbox / "secrets" / "key").write_text("secret")
        (sandbox / "password").write_text("secret")
        (sandbox / "module.py").write_text("x = 1")
        (base / "home" / "other").write_text("not for sessions")
        (base / "link").symlink_to("home/sandbox")
        shutil.copytree(Path(kernel.__file__).parent, sandbox / "kernel")
        shutil.copy(PROGRAM, sandbox)
        below = sandbox / "mount"
        below.mkdir()
        # A file system of its own, as a container's, where we may mount one.
        mounted = (
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", below], capture_output=True).returncode == 0
        )
        below.chmod(0o777)
        try:
            yield base
        finally:
            if mounted:
                subprocess.run(["umount", below], check=True)


def program_settings(place: Path, *, privileged: bool) -> dict[str, Any]:
    sandbox = place / "home" / "sandbox"
    return {
        "sandbox": str(sandbox),
        "privileged": privileged,
        "size_bytes": SIZE_BYTES,
        "inodes": INODES,
        # A path and one beneath it, one through a link, some that need not exist.
        "paths": [
            str(place / "link"),
            str(sandbox),
            str(sandbox / "kernel"),
            sys.base_prefix,
            "/usr",
            "/lib",
            "/lib64",
            "/bin",
            "/not/there",
        ],
        "shown": str(sandbox / "module.py"),
        "mounted": str(sandbox / "mount"),
        "unseen": str(place / "home" / "other"),
        "hidden_directory": str(sandbox / "secrets"),
        "hidden_file": str(sandbox / "password"),
        "link": str(place / "link"),
        "server_pid": os.getpid(),
    }


def start(command: list[str], place: Path, privileged: bool, **options: Any) -> dict[str, Any]:
    program = place / "home" / "sandbox" / PROGRAM.name
    done = subprocess.run(
        [*command, "-I", "-B", str(program), json.dumps(program_settings(place, privileged=privileged))],
        env={},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        umask=0o077,
        **options,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def owned_by(place: Path, uid: int) -> None:
    """Give the place to one user, and make its home private."""
    place.chmod(0o755)
    home = place / "home"
    for path in (home, *home.rglob("*")):
        if os.getuid() == 0:
            os.chown(path, uid, uid)
    home.chmod(0o700)


def assert_isolated(report: dict[str, Any], place: Path, uids: list[int]) -> None:
    assert "refused" not in report, report
    assert report["pid"] == 1
    assert report["footprint"] > 1 << 20
    beneath_tmp = any(Path(path).is_relative_to("/tmp") for path in (sys.base_prefix, place))
    for session_report, uid in zip(report["sessions"], uids, strict=True):
        assert isinstance(session_report, dict), session_report
        session_report = dict(session_report)
        root = set(session_report.pop("root"))
        assert {"dev", "proc", "tmp", "usr", "workspace"} <= root
        assert root.isdisjoint(
            {"home", "root", "sys", "run", "var", "opt", "srv", "boot", ".old", ".empty"}
            - {path.strip("/").split("/")[0] for path in (sys.base_prefix, str(place))}
        )
        devices, links = {"null", "zero", "full", "random", "urandom"}, {"fd", "stdin", "stdout", "stderr"}
        assert links <= set(session_report.pop("dev")) <= devices | links
        assert session_report == {
            "pid": 2,
            "uid": uid,
            "left_behind": [".tmp"],
            "proc_closed": "EBADF",
            "proc": ["cpuinfo", "meminfo", "self", "thread-self"],
            "processes": ["2"],
            "descriptors": session_report["opened"],
            "opened": session_report["opened"],
            "init": "ENOENT",
            "write_proc": "EROFS",
            "interfaces": ["lo"],
            "shown": "done",
            "unseen": "ENOENT",
            "hidden_directory": [],
            "hidden_file": "",
            "link": "home/sandbox",
            "tmp": "/tmp" if beneath_tmp else "/workspace/.tmp",
            "through_link": "done",
            "write": "done",
            "write_tmp": "EROFS" if beneath_tmp else "done",
            "write_null": "done",
            "read_random": "done",
            "meminfo": "MemTotal",
            "write_shown": "EACCES" if uid != SOMEBODY else "EROFS",
            "chmod_shown": "EROFS",
            "write_beside_shown": "EROFS",
            "write_mounted": "EROFS",
            "write_root": "EROFS",
            "write_dev": "EROFS",
            "mount": "EPERM",
            "kill_others": "ESRCH",
            "too_much": "ENOSPC",
            "too_many": "ENOSPC",
            "capabilities": 0,
        }


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_namespaces_as_root(place: Path) -> None:
    owned_by(place, 0)
    report = start([open_python(None)], place, privileged=True)
    if "refused" in report:
        pytest.skip(f"this root may not unshare: {report['refused']}")
    first, second = session_uid(7), session_uid(8)
    assert first is not None
    assert second is not None
    assert_isolated(report, place, [first, second])


def test_namespaces_as_an_unprivileged_user(place: Path) -> None:
    uid = SOMEBODY if os.getuid() == 0 else None
    owned_by(place, SOMEBODY)
    options: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    report = start([open_python(uid)], place, privileged=False, **options)
    if "refused" in report:
        pytest.skip(f"this machine gives no user namespaces to ordinary users: {report['refused']}")
    assert report.pop("still_not_dumpable")
    own = os.getuid() if uid is None else uid
    assert_isolated(report, place, [own, own])


# As in a container: no capability, and a filter on unshare.
DENIED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from kernel import identity, libc, namespaces, seccomp
identity.drop_to(65123, 65123)
libc.set_dumpable(True)
seccomp.install(seccomp.assemble(seccomp.SeccompPolicy(os.getpid())))
said = []
for privileged in (True, False):
    try:
        namespaces.enter_outer(privileged=privileged)
    except OSError as error:
        said.append([error.errno, str(error)])
print(json.dumps(said))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be without its rights")
def test_denied_namespaces_are_reported(place: Path) -> None:
    owned_by(place, SOMEBODY)
    command = [open_python(SOMEBODY), "-I", "-B", "-c", DENIED, str(place / "home" / "sandbox")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [number for number, _ in report] == [1, 1]
    assert all("unshare" in text for _, text in report)
