"""Run by path in an interpreter of its own: puts up the walls it is told of, then tries what its tests ask about.

Prints one JSON object: each attempt's expected outcome and its real one, "done" or the name of the error.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

told: dict[str, Any] = json.loads(sys.argv[1])
sys.path.insert(0, told["sandbox"])

from kernel import identity, landlock, libc, limits, seccomp  # noqa: E402
from kernel.syscalls import current  # noqa: E402

PARENT = os.getppid()
WORKSPACE, OUTSIDE, COMMON = told["workspace"], told["outside"], told["common"]
raw = libc.call


def opened(path: str, flags: int) -> None:
    os.close(os.open(path, flags))


def change_mode_by_descriptor() -> None:
    with open(COMMON, "rb") as file:
        os.fchmod(file.fileno(), 0o777)


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def start_program() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", "print(1)"], check=True, capture_output=True)


EPERM, EACCES, ENOSYS, EOPNOTSUPP = "EPERM", "EACCES", "ENOSYS", errno.errorcode[errno.EOPNOTSUPP]
REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "inet_socket": (EPERM, lambda: socket.socket()),
    "udp_socket": (EPERM, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    "netlink_socket": (EPERM, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "vsock_socket": (EPERM, lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)),
    "unix_socket": (EPERM, lambda: socket.socket(socket.AF_UNIX)),
    "datagram_pair": (EPERM, lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "read_outside": (EACCES, lambda: opened(OUTSIDE, os.O_RDONLY)),
    "write_outside": (EACCES, lambda: opened(OUTSIDE, os.O_WRONLY)),
    "truncate_outside": (EACCES, lambda: os.truncate(OUTSIDE, 0)),
    "create_outside": (EACCES, lambda: opened(OUTSIDE + ".new", os.O_WRONLY | os.O_CREAT)),
    "write_common": (EACCES, lambda: opened(COMMON, os.O_WRONLY)),
    "chmod_outside": (EPERM, lambda: os.chmod(OUTSIDE, 0o777)),
    "chmod_common_by_descriptor": (EPERM, change_mode_by_descriptor),
    "chown_outside": (EPERM, lambda: os.chown(OUTSIDE, os.getuid(), os.getgid())),
    "utime_outside": (EPERM, lambda: os.utime(OUTSIDE, (0, 0))),
    "setxattr_outside": (EOPNOTSUPP, lambda: os.setxattr(OUTSIDE, "user.x", b"x")),
    "limit_of_parent": (EPERM, lambda: resource.prlimit(PARENT, resource.RLIMIT_NOFILE)),
    "kill_parent": (EPERM, lambda: os.kill(PARENT, 0)),
    "kill_all": (EPERM, lambda: os.kill(-1, 0)),
    "queue_signal_to_parent": (EPERM, lambda: raw("rt_sigqueueinfo", PARENT, 0, bytes(128))),
    "affinity_of_parent": (EPERM, lambda: os.sched_setaffinity(PARENT, os.sched_getaffinity(0))),
    "priority_of_parent": (EPERM, lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 19)),
    "pidfd_of_parent": (EPERM, lambda: os.pidfd_open(PARENT)),
    "ptrace_parent": (EPERM, lambda: raw("ptrace", 16, PARENT, 0, 0)),
    "memory_of_parent": (EPERM, lambda: raw("process_vm_readv", PARENT, None, 0, None, 0, 0)),
    "memfd": (EPERM, lambda: os.memfd_create("hidden")),
    "shared_memory": (EPERM, lambda: raw("shmget", 0, 4096, 0o1600)),
    "mount": (EPERM, lambda: raw("mount", b"x", b"/", b"tmpfs", 0, None)),
    "user_namespace": (EPERM, lambda: raw("unshare", 0x10000000)),
    "new_mount_api": (EPERM, lambda: raw("fsopen", b"tmpfs", 0)),
    "io_uring": (EPERM, lambda: raw("io_uring_setup", 1, bytes(120))),
    "bpf": (EPERM, lambda: raw("bpf", 0, bytes(128), 128)),
    "userfault": (EPERM, lambda: raw("userfaultfd", 0)),
    "keyring": (EPERM, lambda: raw("add_key", b"user", b"x", b"y", 1, -3)),
    "own_personality": (EPERM, lambda: raw("personality", 0x0040000)),
    "death_signal": (EPERM, lambda: libc.die_with_parent(signal.SIGTERM)),
    "dumpable": (EPERM, lambda: libc.set_dumpable(True)),
    "new_session": (EPERM, os.setsid),
    "fork": (EPERM, fork),
    "subprocess": (EPERM, start_program),
    "execve": (EPERM, lambda: os.execv("/nonexistent", ["x"])),
    "named_pipe": (EPERM, lambda: os.mkfifo(os.path.join(WORKSPACE, "pipe"))),
    "steal_terminal_input": (EPERM, lambda: fcntl.ioctl(0, 0x5412, b"x")),
    "pipe_size": (EPERM, lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)),
    "lock_that_others_see": (EPERM, lambda: fcntl.flock(os.open(COMMON, 0), fcntl.LOCK_SH)),
    "look_for_a_lock": (EPERM, lambda: fcntl.fcntl(os.open(COMMON, 0), fcntl.F_GETLK, bytes(32))),
    "lock_of_an_open_file": (EPERM, lambda: fcntl.fcntl(os.open(COMMON, 0), 37, bytes(32))),
    "socket_buffer": (
        EPERM,
        lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30),
    ),
    "younger_call": (ENOSYS, lambda: libc.call_number(current().last + 50)),
    "become_root": (EPERM, lambda: os.setuid(0)),
    "another_filter": (EPERM, lambda: raw("seccomp", 0, 0, None)),
}
WORKS: dict[str, tuple[str, Callable[[], object]]] = {"read_common": ("done", lambda: opened(COMMON, 0))}


def works(function: Callable[[], object]) -> Callable[[], object]:
    WORKS[function.__name__] = ("done", function)
    return function


@works
def signal_oneself() -> object:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert len(heard) == 2
    return None


@works
def threads_and_event_loop() -> object:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(abs, range(-50, 0))) == 1275

    async def main() -> None:
        await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(20)))
        assert await asyncio.to_thread(abs, -1) == 1

    return asyncio.run(main())


@works
def files() -> object:
    import shutil
    import tempfile

    tempfile.tempdir = WORKSPACE
    with tempfile.TemporaryDirectory() as name, tempfile.NamedTemporaryFile(dir=name) as file:
        file.write(b"x" * 10000)
        file.flush()
        assert os.path.getsize(file.name) == 10000
    with open("a", "w") as text:
        fcntl.lockf(text, fcntl.LOCK_EX)
        text.write("text")
        os.fsync(text.fileno())
    shutil.copyfile("a", "b")
    os.rename("b", "c")
    os.link("a", "d")
    os.symlink("a", "e")
    os.mkdir("f")
    shutil.move("c", "f")
    assert sorted(os.listdir("f")) == ["c"]
    return shutil.rmtree("f")


@works
def archives_and_database() -> object:
    import sqlite3
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
    connection = sqlite3.connect("base.sqlite")
    connection.execute("create table t (x)")
    connection.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    connection.commit()
    assert connection.execute("select sum(x) from t").fetchone() == (499500,)
    return connection.close()


@works
def memory_maps_and_randomness() -> object:
    import mmap
    import random
    import uuid

    with mmap.mmap(-1, 1 << 20) as area:
        area[:4] = b"abcd"
    ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)()
    with open("/dev/urandom", "rb") as device:
        device.read(8)
    return os.urandom(8), random.SystemRandom().random(), uuid.uuid4()


@works
def pairs_and_pipes() -> object:
    import select

    left, right = socket.socketpair()
    left.sendall(b"x" * 100)
    assert select.select([right], [], [], 5)[0]
    assert len(right.recv(200)) == 100
    read, write = os.pipe()
    os.write(write, b"x")
    return os.read(read, 1)


@works
def arrays() -> object:
    import numpy

    assert float((numpy.ones((200, 200)) @ numpy.ones((200, 200))).sum()) == 8000000.0
    return numpy.random.default_rng().normal(size=10)


def copy_with_modes() -> None:
    import shutil

    with open("m", "w") as file:
        file.write("text")
    shutil.copy("m", "m1")
    shutil.copy2("m", "m2")


def figure() -> None:
    os.environ["MPLCONFIGDIR"] = WORKSPACE
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.pyplot.plot([1, 3, 2])
    matplotlib.pyplot.savefig("figure.png")
    with open("figure.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


# Modes are set where no file of the server's has the same owner.
MODES = "done" if told["uid"] is not None else EPERM
ATTEMPTS = {**REFUSED, **WORKS, "copy_with_modes": (MODES, copy_with_modes), "figure": ("done", figure)}


def put_up_walls() -> None:
    os.chdir(WORKSPACE)
    # Opened while its path can still be walked, as the zygote does.
    readable = [landlock.open_path(path) for path in told["readable"]]
    execute = told["policy"] == "subprocess"
    if told["uid"] is not None:
        os.chown(WORKSPACE, told["uid"], told["uid"])
        identity.drop_to(told["uid"], told["uid"])
    limits.one_arena()
    limits.apply_rlimits(
        memory_bytes=512 << 20,
        file_bytes=8 << 20,
        open_files=64,
        processes=64,
        existing_tasks=limits.count_tasks(os.getuid()),
    )
    writable = [WORKSPACE, "/dev/null", "/dev/urandom"]
    landlock.restrict(landlock.prepare_rules(readable, execute=execute), writable, execute=execute)
    identity.drop_capabilities()
    libc.set_dumpable(False)
    policies = {
        "plain": seccomp.SeccompPolicy(os.getpid(), shared_uid=told["uid"] is None),
        "subprocess": seccomp.SeccompPolicy(None, allow_subprocess=True),
        "fork": seccomp.SeccompPolicy(None, allow_fork=True),
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


put_up_walls()
if told["killed_by"]:
    libc.call_number(told["killed_by"])
names = told["only"] or [name for name in ATTEMPTS if name not in told["without"]]
json.dump({name: (ATTEMPTS[name][0], outcome(ATTEMPTS[name][1])) for name in names}, sys.stdout)
