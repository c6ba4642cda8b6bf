"""Run by path in an interpreter of its own: puts up the walls it is told of, then tries what its tests ask about.

Prints one JSON object: the outcome of each attempt, "done" or the name of the error.
"""

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

told: dict[str, Any] = json.loads(sys.argv[1])
sys.path.insert(0, told["sandbox"])

from kernel import identity, landlock, libc, limits, seccomp  # noqa: E402
from kernel.syscalls import current  # noqa: E402

PARENT = os.getppid()
ATTEMPTS: dict[str, Callable[[], object]] = {}


def attempt(function: Callable[[], object]) -> Callable[[], object]:
    ATTEMPTS[function.__name__] = function
    return function


def raw(name: str, *arguments: Any) -> int:
    return libc.call(name, *arguments)


def outside(flags: int, path: str | None = None) -> None:
    os.close(os.open(path or told["outside"], flags))


# ---------------------------------------------------------------------------------- what must not go


@attempt
def inet_socket() -> object:
    return socket.socket()


@attempt
def udp_socket() -> object:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


@attempt
def netlink_socket() -> object:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)


@attempt
def vsock_socket() -> object:
    return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)


@attempt
def unix_socket() -> object:
    return socket.socket(socket.AF_UNIX)


@attempt
def datagram_pair() -> object:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


@attempt
def read_outside() -> object:
    return outside(os.O_RDONLY)


@attempt
def write_outside() -> object:
    return outside(os.O_WRONLY)


@attempt
def truncate_outside() -> object:
    return os.truncate(told["outside"], 0)


@attempt
def create_outside() -> object:
    return outside(os.O_WRONLY | os.O_CREAT, told["outside"] + ".new")


@attempt
def write_common() -> object:
    return outside(os.O_WRONLY, told["common"])


@attempt
def chmod_outside() -> object:
    return os.chmod(told["outside"], 0o777)


@attempt
def chmod_common_by_descriptor() -> object:
    with open(told["common"], "rb") as file:
        return os.fchmod(file.fileno(), 0o777)


@attempt
def chown_outside() -> object:
    return os.chown(told["outside"], os.getuid(), os.getgid())


@attempt
def utime_outside() -> object:
    return os.utime(told["outside"], (0, 0))


@attempt
def setxattr_outside() -> object:
    return os.setxattr(told["outside"], "user.x", b"x")


@attempt
def limit_of_parent() -> object:
    import resource

    return resource.prlimit(PARENT, resource.RLIMIT_NOFILE)


@attempt
def kill_parent() -> object:
    return os.kill(PARENT, 0)


@attempt
def kill_all() -> object:
    return os.kill(-1, 0)


@attempt
def queue_signal_to_parent() -> object:
    return raw("rt_sigqueueinfo", PARENT, 0, bytes(128))


@attempt
def affinity_of_parent() -> object:
    return os.sched_setaffinity(PARENT, os.sched_getaffinity(0))


@attempt
def priority_of_parent() -> object:
    return os.setpriority(os.PRIO_PROCESS, PARENT, 19)


@attempt
def pidfd_of_parent() -> object:
    return os.pidfd_open(PARENT)


@attempt
def ptrace_parent() -> object:
    return raw("ptrace", 16, PARENT, 0, 0)


@attempt
def memory_of_parent() -> object:
    return raw("process_vm_readv", PARENT, None, 0, None, 0, 0)


@attempt
def memfd() -> object:
    return os.memfd_create("hidden")


@attempt
def shared_memory() -> object:
    return raw("shmget", 0, 4096, 0o1600)


@attempt
def mount() -> object:
    return raw("mount", b"x", b"/", b"tmpfs", 0, None)


@attempt
def user_namespace() -> object:
    return raw("unshare", 0x10000000)


@attempt
def new_mount_api() -> object:
    return raw("fsopen", b"tmpfs", 0)


@attempt
def io_uring() -> object:
    return raw("io_uring_setup", 1, bytes(120))


@attempt
def bpf() -> object:
    return raw("bpf", 0, bytes(128), 128)


@attempt
def userfault() -> object:
    return raw("userfaultfd", 0)


@attempt
def keyring() -> object:
    return raw("add_key", b"user", b"x", b"y", 1, -3)


@attempt
def own_personality() -> object:
    return raw("personality", 0x0040000)


@attempt
def death_signal() -> object:
    return libc.die_with_parent(signal.SIGTERM)


@attempt
def dumpable() -> object:
    return libc.set_dumpable(True)


@attempt
def new_session() -> object:
    return os.setsid()


@attempt
def fork() -> object:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)


@attempt
def subprocess_() -> object:
    import subprocess

    return subprocess.run([sys.executable, "-I", "-S", "-c", "print(1)"], check=True, capture_output=True)


@attempt
def execve() -> object:
    return os.execv("/nonexistent", ["x"])


@attempt
def named_pipe() -> object:
    return os.mkfifo(os.path.join(told["workspace"], "pipe"))


@attempt
def steal_terminal_input() -> object:
    import fcntl

    return fcntl.ioctl(0, 0x5412, b"x")


@attempt
def pipe_size() -> object:
    import fcntl

    return fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)


@attempt
def younger_call() -> object:
    return libc.call_number(current().last + 50)


@attempt
def become_root() -> object:
    return os.setuid(0)


@attempt
def another_filter() -> object:
    return raw("seccomp", 0, 0, None)


# ------------------------------------------------------------------------------------- what must go


@attempt
def read_common() -> object:
    return outside(os.O_RDONLY, told["common"])


@attempt
def signal_oneself() -> object:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert len(heard) == 2
    return None


@attempt
def threads() -> object:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(abs, range(-50, 0))) == 1275
    return None


@attempt
def event_loop() -> object:
    import asyncio

    async def main() -> None:
        await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(20)))
        assert await asyncio.to_thread(abs, -1) == 1

    return asyncio.run(main())


@attempt
def temporary_files() -> object:
    import tempfile

    tempfile.tempdir = told["workspace"]
    with tempfile.TemporaryDirectory() as name, tempfile.NamedTemporaryFile(dir=name) as file:
        file.write(b"x" * 10000)
        file.flush()
        assert os.path.getsize(file.name) == 10000
    return None


@attempt
def copies() -> object:
    import shutil

    with open("a", "w") as file:
        file.write("text")
    shutil.copyfile("a", "b")
    os.rename("b", "c")
    os.link("a", "d")
    os.symlink("a", "e")
    os.mkdir("f")
    shutil.move("c", "f")
    assert sorted(os.listdir("f")) == ["c"]
    return shutil.rmtree("f")


@attempt
def copies_with_modes() -> object:
    import shutil

    with open("m", "w") as file:
        file.write("text")
    shutil.copy("m", "m1")
    return shutil.copy2("m", "m2")


@attempt
def archives() -> object:
    import tarfile
    import zipfile

    with open("z", "w") as file:
        file.write("text" * 1000)
    with zipfile.ZipFile("z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write("z")
    with zipfile.ZipFile("z.zip") as archive:
        archive.extractall("unzipped")
    with tarfile.open("z.tar.gz", "w:gz") as packed:
        packed.add("z")
    return None


@attempt
def database() -> object:
    import sqlite3

    connection = sqlite3.connect("base.sqlite")
    connection.execute("create table t (x)")
    connection.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    connection.commit()
    assert connection.execute("select sum(x) from t").fetchone() == (499500,)
    return connection.close()


@attempt
def memory_maps() -> object:
    import ctypes
    import mmap

    with mmap.mmap(-1, 1 << 20) as area:
        area[:4] = b"abcd"
    return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)()


@attempt
def randomness() -> object:
    import random
    import uuid

    with open("/dev/urandom", "rb") as device:
        device.read(8)
    return os.urandom(8), random.SystemRandom().random(), uuid.uuid4()


@attempt
def pairs_and_pipes() -> object:
    import select

    left, right = socket.socketpair()
    left.sendall(b"x" * 100)
    assert select.select([right], [], [], 5)[0]
    assert len(right.recv(200)) == 100
    left.close()
    right.close()
    read, write = os.pipe()
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read)
    return os.close(write)


@attempt
def arrays() -> object:
    import numpy

    assert float((numpy.ones((200, 200)) @ numpy.ones((200, 200))).sum()) == 8000000.0
    return numpy.random.default_rng().normal(size=10)


@attempt
def figure() -> object:
    os.environ["MPLCONFIGDIR"] = told["workspace"]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.pyplot.plot([1, 3, 2])
    matplotlib.pyplot.savefig("figure.png")
    with open("figure.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"
    return None


# ------------------------------------------------------------------------------------------- walls


def walls() -> None:
    os.chdir(told["workspace"])
    # Opened while its path can still be walked, as the zygote does.
    readable = [landlock.open_path(path) for path in told["readable"]]
    if told.get("uid") is not None:
        os.chown(told["workspace"], told["uid"], told["uid"])
        identity.drop_to(told["uid"], told["uid"])
    limits.one_arena()
    limits.apply_rlimits(
        memory_bytes=512 << 20,
        file_bytes=8 << 20,
        open_files=64,
        processes=64,
        existing_tasks=limits.count_tasks(os.getuid()),
    )
    devices = ["/dev/null", "/dev/urandom"]
    execute = told["policy"] == "subprocess"
    landlock.restrict(landlock.Rules(readable, [told["workspace"], *devices], execute=execute))
    identity.drop_capabilities()
    libc.set_dumpable(False)
    own = os.getpid()
    shared = told.get("uid") is None
    policies = {
        "plain": seccomp.Policy(own, shared_uid=shared),
        "subprocess": seccomp.Policy(None, allow_subprocess=True, shared_uid=shared),
        "fork": seccomp.Policy(None, allow_fork=True, shared_uid=shared),
    }
    seccomp.install(seccomp.assemble(policies[told["policy"]]))


def outcome(function: Callable[[], object]) -> str:
    try:
        function()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    except BaseException as error:
        return repr(error)
    return "done"


def main() -> None:
    walls()
    if told.get("killed_by"):
        libc.call_number(told["killed_by"])
    names = told["only"]
    json.dump({name: outcome(ATTEMPTS[name]) for name in names}, sys.stdout)


main()
