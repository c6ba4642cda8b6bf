"""Ordinary code works in the sandbox."""

import ast
import importlib.util

import pytest
from living import OpenSession, value

from openenv_core.sandbox import Limits, SandboxSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

CODE = {
    "signals": """
        import os, signal
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 2
        """,
    "threads and event loops": """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(abs, range(-50, 0))) == 1275
        await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(20)))
        assert await asyncio.to_thread(abs, -1) == 1
        """,
    "files": """
        import fcntl, os, shutil, tempfile
        with tempfile.TemporaryDirectory() as name, tempfile.NamedTemporaryFile(dir=name) as file:
            file.write(b"x" * 10000)
            file.flush()
            assert os.path.getsize(file.name) == 10000
        with open("a", "w") as text:
            fcntl.lockf(text, fcntl.LOCK_EX)
            text.write("text")
            os.fsync(text.fileno())
        shutil.copy("a", "b")
        shutil.copy2("a", "g")
        os.rename("b", "c")
        os.link("a", "d")
        os.symlink("a", "e")
        os.mkdir("f")
        shutil.move("c", "f")
        assert os.listdir("f") == ["c"]
        shutil.rmtree("f")
        """,
    "archives and databases": """
        import sqlite3, tarfile, zipfile
        with open("z", "w") as file:
            file.write("text" * 1000)
        with zipfile.ZipFile("z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write("z")
        with zipfile.ZipFile("z.zip") as archive:
            archive.extractall("unzipped")
        with tarfile.open("z.tar.gz", "w:gz") as packed:
            packed.add("z")
        with sqlite3.connect("base.sqlite") as connection:
            connection.execute("create table t (x)")
            connection.executemany("insert into t values (?)", [(n,) for n in range(1000)])
            assert connection.execute("select sum(x) from t").fetchone() == (499500,)
        """,
    "memory maps and randomness": """
        import ctypes, mmap, os, random, uuid
        with mmap.mmap(-1, 1 << 20) as area:
            area[:4] = b"abcd"
        ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)()
        with open("/dev/urandom", "rb") as device:
            device.read(8)
        os.urandom(8), random.SystemRandom().random(), uuid.uuid4()
        """,
    "pairs and pipes": """
        import os, select, socket
        left, right = socket.socketpair()
        left.sendall(b"x" * 100)
        assert select.select([right], [], [], 5)[0]
        assert len(right.recv(200)) == 100
        read, write = os.pipe()
        os.write(write, b"x")
        assert os.read(read, 1) == b"x"
        """,
}
ARRAYS = """
    import numpy
    assert float((numpy.ones((200, 200)) @ numpy.ones((200, 200))).sum()) == 8000000.0
    numpy.random.default_rng().normal(size=10)
    """
FIGURE = """
    import matplotlib.pyplot
    matplotlib.pyplot.plot([1, 3, 2])
    matplotlib.pyplot.show()
    matplotlib.pyplot.plot([2, 3, 1])
    """


@pytest.mark.parametrize("name", CODE)
async def test_the_standard_library_works(session: SandboxSession, name: str) -> None:
    done = await session.execute(f"if True:{CODE[name]}")
    assert done.status == "ok", done.error


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
async def test_preloaded_packages_work(open_session: OpenSession) -> None:
    session = await open_session(Limits(timeout_s=60.0))
    for code in (ARRAYS, FIGURE):
        done = await session.execute(f"if True:{code}")
        assert done.status == "ok", done.error
    assert ["image/png" in output.data for output in done.outputs] == [True, True]


SCRIPTS = {
    "diff <(seq 3) <(printf '1\\n2\\n3\\n') && echo same": "same",
    "mapfile -t lines < <(seq 3); echo ${#lines[@]}": "3",
    "echo kept | tee >(cat > copy) > /dev/null; until [ -s copy ]; do sleep 0.01; done; cat copy": "kept",
    "echo out > /dev/stdout": "out",
    "echo err > /dev/stderr": "err",
    "echo in | cat /dev/stdin": "in",
    "exec 3<>both; echo two >&3; cat both": "two",
    "seq 9999 | sort -S 100k -R | wc -l": "9999",
    "echo 1 2 | awk '{print $2}'": "2",
    "timeout 0.1 sleep 60 2>&1; echo $?": "124",
    "cat <<< here; : < /dev/null > $(mktemp) && echo made": "here\nmade",
}
"""What shell scripts take for granted, and what they print."""


async def test_what_shell_scripts_take_for_granted_is_there(open_session: OpenSession) -> None:
    session = await open_session(Limits(allow_subprocess=True))
    printed = await value(
        session,
        "import subprocess\n"
        "def run(script):\n"
        "    return subprocess.run(['bash', '-c', script], stdout=-1, stderr=-2, timeout=30).stdout.decode().strip()\n"
        f"{{script: run(script) for script in {list(SCRIPTS)!r}}}",
    )
    assert ast.literal_eval(printed or "") == SCRIPTS


@pytest.mark.parametrize("snapshot", [False, True], ids=["plain", "snapshot"])
async def test_programs_may_open_the_streams_of_an_execution(
    open_session: OpenSession, snapshot: bool
) -> None:
    session = await open_session(Limits(allow_subprocess=True), snapshot=snapshot)
    sessions = [session, *(await session.fork(1) if snapshot else ())]
    for each in sessions:
        done = await each.execute(
            "import subprocess\nsubprocess.run('echo err | tee /dev/stderr > /dev/stdout', shell=True).returncode"
        )
        assert (done.stdout, done.stderr) == ("err\n", "err\n"), done


async def test_a_program_sees_its_own_descriptors_and_no_others(open_session: OpenSession) -> None:
    session = await open_session(Limits(allow_subprocess=True))
    code = (
        "import subprocess; subprocess.run(['readlink', *['/dev/fd/' + str(n) for n in range(9)]]).returncode"
    )
    done = await session.execute(code)
    # Its streams; nothing of the interpreter's, nor of the sandbox's.
    assert len(done.stdout.splitlines()) == 3, done
    assert all(line.startswith(("pipe:", "/dev/null")) for line in done.stdout.splitlines()), done
