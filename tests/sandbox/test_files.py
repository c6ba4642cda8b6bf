"""Files of the workspace, whatever code puts there, and hidden files of the machine."""

import asyncio
import hashlib
import resource
from pathlib import Path

import pytest
from living import OpenSession, executed

from openenv_core.sandbox import FileRefusedError, Isolation, Limits, Sandbox, SandboxConfig, SandboxSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKOUT = Path(__file__).resolve().parents[2]
LONG, DEEP = "x" * 300, "/".join("a" * 40)
OUTSIDE = ("../x", "/etc/passwd", "a/../../x", "", ".", "a\0b", "a\nb", "..", "./..", LONG, DEEP)
FULL = Limits(disk_bytes=1 << 20, file_bytes=256 << 10, grace_s=0.1, timeout_s=20.0)
FILLS = (
    "import os, time\nfor i in range(10**6):\n    open(f'f{i}', 'wb').write(bytes(100_000)); time.sleep(0.01)"
)


@pytest.mark.slow
async def test_sparse_files_are_hashed_without_using_memory(sandbox: Sandbox) -> None:
    size = 200 << 20
    limits = Limits(disk_bytes=1 << 30, file_bytes=size)
    sessions = [await sandbox.open(limits) for _ in range(3)]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    holes = f"with open('holes', 'wb') as file:\n    file.truncate({size})"
    done = await asyncio.gather(*(session.execute(holes) for session in sessions))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin
    (file_info,) = {(file.path, file.size, file.sha256) for one in done for file in one.files}
    assert file_info == ("holes", size, hashlib.sha256(bytes(size)).hexdigest())
    assert grown < 100 << 10  # in KiB; one of them would be twice that
    for session in sessions:
        await session.close()


async def test_files_are_put_listed_and_read_back(session: SandboxSession) -> None:
    put = await session.put_file("data/in.bin", b"\0\xff")
    done = await session.execute(
        "import os\nb = open('data/in.bin', 'rb').read()\nopen('out.txt', 'w').write('x')\n"
        "os.rename('data/in.bin', 'data/b')"
    )
    assert (put.path, put.size, put.sha256) == ("data/in.bin", 2, hashlib.sha256(b"\0\xff").hexdigest())
    assert done.status == "ok"
    assert [file.path for file in done.files] == ["data/b", "out.txt"]
    assert await session.get_file("data/b") == b"\0\xff"
    assert [file.path for file in await session.list_files()] == ["data/b", "out.txt"]
    unchanged = await session.execute("1")
    same_size = await session.execute(
        "os.utime('out.txt', (0, 0)); s = os.stat('out.txt'); open('out.txt', 'w').write('y')"
    )
    assert unchanged.files == ()
    assert [file.path for file in same_size.files] == ["out.txt"]
    await session.restart()
    assert await session.list_files() == []


async def test_paths_outside_the_workspace_are_refused(session: SandboxSession) -> None:
    for path in OUTSIDE:
        with pytest.raises(FileRefusedError):
            await session.put_file(path, b"x")
        with pytest.raises(FileRefusedError):
            await session.get_file(path)


async def test_links_and_folders_are_not_files(session: SandboxSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    done = await session.execute(
        f"import os\nos.symlink({str(secret)!r}, 'link')\nos.symlink({str(tmp_path)!r}, 'folder')\n"
        "os.mkdir('d')\nos.symlink('d', 'inner')"
    )
    assert done.status == "ok"
    for path in ("link", "folder/secret", "d", "inner/x", "none"):
        with pytest.raises(FileRefusedError):
            await session.get_file(path)
    for path in ("link", "folder/new", "inner/x", "d"):
        with pytest.raises(FileRefusedError):
            await session.put_file(path, b"overwritten")
    assert secret.read_text() == "secret"
    assert not (tmp_path / "new").exists()
    assert await session.list_files() == []


async def test_files_over_the_limits_are_refused(open_session: OpenSession) -> None:
    session = await open_session(Limits(file_bytes=64 << 10, disk_bytes=128 << 10))
    with pytest.raises(FileRefusedError, match="more than a file may have"):
        await session.put_file("a", bytes(65 << 10))
    for name in ("a", "b"):
        await session.put_file(name, bytes(48 << 10))
    with pytest.raises(FileRefusedError, match=r"full|may hold"):
        await session.put_file("c", bytes(60 << 10))


async def test_filling_the_disk_is_stopped(sandbox: Sandbox) -> None:
    (done,) = await executed(sandbox, FILLS, limits=FULL)
    nested = "import os\nfor _ in range(100):\n    os.mkdir('d'); os.chdir('d')\n"
    (deep,) = await executed(sandbox, nested + FILLS, limits=FULL)
    assert deep.status in ("error", "killed"), deep
    if sandbox.isolation == "namespaces":
        assert done.error is not None
        assert "No space left" in done.error.evalue
    else:
        assert (done.status, done.reason) == ("killed", "its files grew beyond 1048576 bytes or 4096 files")


async def test_nested_protected_and_undecodable_files_are_removed(
    sandbox: Sandbox, session: SandboxSession
) -> None:
    done = await session.execute(
        "import os\n"
        "for _ in range(300):\n    os.mkdir('d'); os.chdir('d')\n"
        "os.mkdir('x'); open('x/f', 'w').close(); fd = os.open('x', os.O_RDONLY); os.fchmod(fd, 0)\n"
        "open(b'\\xff\\xfe', 'w').close()"
    )
    listed = await session.list_files()
    await session.close()
    # Where the file system holds no limits, what is too deep to be counted ends the session.
    assert done.status == ("ok" if sandbox.isolation == "namespaces" else "killed")
    assert listed == []  # beyond the depth that is looked at
    scratch = sandbox._scratch
    assert scratch is None or [path.name for path in scratch.path.glob("[0-9]*")] == []


@pytest.mark.parametrize("level", [Isolation.NAMESPACES, Isolation.LSM])
async def test_hidden_files_and_this_checkout_are_unreachable(tmp_path: Path, level: Isolation) -> None:
    for name in ("shown", "tasks/train", "single"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("canary")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    hidden = (tmp_path / "tasks", tmp_path / "single")
    away = [tmp_path / "tasks/train", tmp_path / "single"]
    # A checkout below a folder that is shown is hidden as well.
    away += [CHECKOUT / "envs/code_interpreter_env/tasks/train.jsonl", Path(__file__)]
    config = SandboxConfig(strongest=level, readable=(tmp_path, CHECKOUT), hidden=hidden)
    async with Sandbox(config) as sandbox:
        assert sandbox.isolation == level
        for path in (tmp_path / "shown", CHECKOUT / "pyproject.toml"):
            (execution,) = await executed(sandbox, f"len(open({str(path)!r}).read())")
            assert execution.result == str(len(path.read_text())), execution
        for path in away:
            assert path.is_file()
            (done,) = await executed(sandbox, f"open({str(path)!r}).read()")
            assert done.result in (None, "''"), path  # a file may be there, and be empty
