"""Control groups: real ones where this machine allows them, and files that imitate version 2."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interpreters import in_process

from openenv_core.sandbox.kernel import cgroups
from openenv_core.sandbox.kernel.cgroups import CgroupMaker


@pytest.fixture(scope="module")
def maker() -> CgroupMaker:
    maker = cgroups.find()
    if maker is None:
        pytest.skip("this process may not make control groups here")
    return maker


def directories(maker: CgroupMaker) -> list[Path]:
    prefix = f"ropewalk-{os.getpid()}-"
    return [path for parent in maker.parents.values() for path in parent.glob(prefix + "*")]


def test_shared_memory_counts_and_its_user_is_killed(maker: CgroupMaker) -> None:
    group = maker.make("oom", 32 << 20, 16)
    doors = group.open_join_files()
    pid = os.fork()
    if pid == 0:
        cgroups.join(doors)
        with mmap.mmap(-1, 128 << 20) as area:
            for at in range(0, len(area), 4096):
                area[at] = 1
        os._exit(0)
    for door in doors:
        os.close(door)
    status = os.waitpid(pid, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert group.count_oom_kills() > 0
    assert group.remove()
    assert directories(maker) == []


def test_process_limit_of_a_group_holds(maker: CgroupMaker) -> None:
    group = maker.make("pids", 64 << 20, 3)

    def inside() -> int:
        cgroups.join(group.open_join_files())
        children = []
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except BlockingIOError:
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return len(children)

    assert in_process(inside) == 2
    assert group.count_oom_kills() == 0
    assert group.remove()


def test_killed_group_is_removed(maker: CgroupMaker) -> None:
    group = maker.make("kill", 64 << 20, 16)
    code = "import os, time; os.fork(); os.fork(); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: cgroups.join(group.open_join_files()),
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        assert len(group.pids()) == 4
        assert process.pid in group.pids()
        assert not group.remove()
        group.kill()
        assert process.wait(30) == -signal.SIGKILL
        process.stdout.read()
    deadline = time.monotonic() + 30  # the others are reaped by whoever adopted them
    while not group.remove():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert directories(maker) == []


def test_groups_of_dead_owners_are_swept(maker: CgroupMaker) -> None:
    pid = os.fork()
    if pid == 0:
        maker.make("left", 64 << 20, 16)
        os._exit(0)
    os.waitpid(pid, 0)
    left = {path for parent in maker.parents.values() for path in parent.glob(f"ropewalk-{pid}-*-left")}
    assert len(left) == len(set(maker.parents.values()))
    kept = maker.make("kept", 64 << 20, 16)
    maker.sweep()
    assert not any(path.exists() for path in left)
    assert all(path.is_dir() for path in kept.directories.values())
    assert kept.remove()


def test_failed_creation_leaves_no_group(maker: CgroupMaker) -> None:
    with pytest.raises(OSError, match=r"pids\.max"):
        maker.make("wrong", 64 << 20, -5)
    assert directories(maker) == []
    one, two = maker.make("same", 64 << 20, 16), maker.make("same", 64 << 20, 16)
    assert one.remove()
    assert all(path.is_dir() for path in two.directories.values())
    assert two.remove()


def test_foreign_group_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 8)
    memory, pids = tmp_path / "memory", tmp_path / "pids"
    theirs = pids / f"ropewalk-{os.getpid()}-00000000-same"
    memory.mkdir()
    theirs.mkdir(parents=True)
    with pytest.raises(FileExistsError):
        CgroupMaker(1, {"memory": memory, "pids": pids}).make("same", 64 << 20, 16)
    assert theirs.is_dir()
    assert list(memory.iterdir()) == []


# ------------------------------------------------- version 2, by files that look like it: a fake


def fake_group(directory: Path, handed_down: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").write_text("")
    (directory / "cgroup.subtree_control").write_text(handed_down)


def test_version_2_is_found_beside_a_delegated_group(tmp_path: Path) -> None:
    fake_group(tmp_path, "cpu memory pids")
    fake_group(tmp_path / "ours", "")
    (tmp_path / "ours" / "cgroup.subtree_control").chmod(0o400)
    groups = cgroups._version_2({"": ("/", tmp_path)}, {"": "/ours"})
    # A real group refuses the write that this fake one takes, and then its parent is asked.
    assert groups is not None
    assert groups.version == 2
    assert set(groups.parents) == {"memory", "pids"}
    for without_controllers in ({}, {"": ("/", tmp_path / "ours")}):
        assert cgroups._version_2(without_controllers, {"": "/gone"}) is None


def test_version_2_reports_an_oom_kill(tmp_path: Path) -> None:
    group = cgroups.Cgroup({"memory": tmp_path, "pids": tmp_path})
    assert group.count_oom_kills() == 0
    for kills in (0, 2):
        events = f"low 0\noom 1\noom_kill {kills}\noom_group_kill 0\n"
        (tmp_path / "memory.events").write_text(events)
        assert (group.count_oom_kills() > 0) == (kills > 0)


def test_partially_mounted_hierarchy_is_found() -> None:
    mounted = ("/docker/abc", Path("/sys/fs/cgroup/memory"))
    assert cgroups._own_directory(mounted, "/docker/abc/x") == Path("/sys/fs/cgroup/memory/x")
    assert cgroups._own_directory(mounted, "/docker/abc") == Path("/sys/fs/cgroup/memory")
    assert cgroups._own_directory(mounted, "/elsewhere") == Path("/sys/fs/cgroup/memory")


def test_unreadable_mounts_give_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> dict[str, tuple[str, Path]]:
        raise FileNotFoundError("/proc/self/mountinfo")

    monkeypatch.setattr(cgroups, "_read_mounts", nothing)
    assert cgroups.find() is None
