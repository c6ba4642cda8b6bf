"""Runs a program that sees only some folders and one port: in namespaces of its own, without privileges.

    python -m rl_bridge.agents.confine SOCKET COMMAND...

SOCKET is a descriptor of a socket, from which a `Confinement` is read as JSON, to its end; with its first byte come the
descriptors of `Cgroup.open_join_files`, if there is a control group. The socket that listens in the program's network
is sent back over it, and whoever gets that decides where connections go.
"""

import errno
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Final

from openenv_core.sandbox.kernel import cgroups, identity, libc, namespaces, seccomp
from openenv_core.sandbox.kernel.syscalls import current

FOLDER: Final = namespaces.WORKSPACE
"""The program's folder: in memory, and gone with the program."""
MAX_DISK_BYTES: Final = 1 << 30
"""Of its folder, and of its output."""
MAX_FILES: Final = 100_000
BACKLOG: Final = 128
MAX_DOORS: Final = 2
CHECK_INTERVAL_S: Final = 0.25
"""How often memory and processes are counted where there is no control group."""

_AF_NETLINK: Final = 16
_SOCKET_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, _AF_NETLINK)
"""Those that a network namespace confines; others, such as vsock, it does not."""
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_NAME_BYTES: Final = 16
_IFREQ_BYTES: Final = 40


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a program gets.

    Attributes:
        shown: Files and folders that it may read and execute.
        hidden: Paths below those that it may not.
        files: Files to write before it starts, by their paths in its folder.
        port: The port of its 127.0.0.1 that leads out.
        memory_bytes: The memory of all its processes.
        processes: How many processes and threads it may have.
    """

    shown: Sequence[str]
    hidden: Sequence[str]
    files: Mapping[str, str]
    port: int
    memory_bytes: int
    processes: int

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()


def main(arguments: Sequence[str]) -> int:
    """Confine a program and run it; returns its exit code, 128 more than the signal that killed it."""
    with socket.socket(fileno=int(arguments[0])) as link:
        first, doors, _, _ = socket.recv_fds(link, 1, MAX_DOORS)
        parts = [first]
        while part := link.recv(1 << 16):
            parts.append(part)
        spec = Confinement(**json.loads(b"".join(parts)))
        proc = namespaces.open_proc()
        namespaces.enter_outer(privileged=False)
        with _listen(spec.port) as listener:
            socket.send_fds(link, [b"."], [listener.fileno()])
    init = os.fork()
    if init == 0:
        libc.die_with_parent()
        os.close(proc)
        cgroups.join(doors)
        _become_init(spec, arguments[1:])
    for door in doors:
        os.close(door)
    return _wait_for(init) if doors else _watch(init, proc, spec)


def _listen(port: int) -> socket.socket:
    """Start the loopback interface of this network, and listen on it."""
    with socket.socket() as control:
        name = b"lo".ljust(_NAME_BYTES, b"\0")
        (flags,) = struct.unpack_from(
            "=H", ioctl(control, _SIOCGIFFLAGS, name.ljust(_IFREQ_BYTES, b"\0")), _NAME_BYTES
        )
        request = name + struct.pack("=H", flags | _IFF_UP)
        ioctl(control, _SIOCSIFFLAGS, request.ljust(_IFREQ_BYTES, b"\0"))
    return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)


def _become_init(spec: Confinement, command: Sequence[str]) -> None:
    """Build the program's view of the machine, start it, and exit with its code, which ends all that it started."""
    namespaces.build_root(spec.shown, spec.hidden)
    namespaces.settle_session(True, os.getuid(), os.getgid(), MAX_DISK_BYTES, MAX_FILES)
    os.chdir(FOLDER)
    program = os.fork()
    if program == 0:
        write_files(Path(FOLDER), spec.files)
        identity.drop_capabilities()
        libc.no_new_privileges()
        resource.setrlimit(resource.RLIMIT_NPROC, (spec.processes, spec.processes))  # does not bind root
        # Its output is a file of the worker's, on a disk that others need.
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_DISK_BYTES, MAX_DISK_BYTES))
        seccomp.install(_make_filter())
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            sys.stderr.write(f"cannot run {command[0]!r} in the sandbox: {error.strerror}\n")
            os._exit(127)
    identity.drop_capabilities()
    os._exit(_wait_for(program))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by their paths in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _make_filter() -> bytes:
    """Return a filter that permits all calls, but sockets of some families only, however they are made."""
    architecture = current()
    verdicts: dict[int, seccomp.Verdict] = {
        architecture.numbers["socket"]: seccomp.SeccompRule(
            ((seccomp.one_of(0, _SOCKET_FAMILIES),),), otherwise=errno.EAFNOSUPPORT
        ),
        architecture.numbers["io_uring_setup"]: seccomp.answer(errno.ENOSYS),
    }
    tree = seccomp.decide(verdicts, seccomp.ALLOW, architecture.last)
    return seccomp.program(architecture.audit, architecture.foreign_from, tree)


def _wait_for(child: int) -> int:
    """Reap children until this one has ended; returns its exit code."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _watch(init: int, proc: int, spec: Confinement) -> int:
    """Like `_wait_for`, and end what takes too much: of processes all, of memory the largest process.

    Args:
        init: The first process of the program's namespace; what its processes leave behind becomes its child.
        proc: A descriptor of the machine's /proc.
        spec: The limits.
    """
    while True:
        pid, status = os.waitpid(init, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        sizes, tasks = _measure(init, proc)
        if tasks > spec.processes or sum(sizes.values()) > spec.memory_bytes:
            largest = max(sizes, key=lambda one: sizes[one], default=init)
            sys.stderr.write(
                f"killed in the sandbox: {sum(sizes.values())} bytes, {tasks} processes and threads\n"
            )
            with suppress(ProcessLookupError):
                os.kill(init if tasks > spec.processes else largest, signal.SIGKILL)
        time.sleep(CHECK_INTERVAL_S)


def _measure(init: int, proc: int) -> tuple[dict[int, int], int]:
    """Return the memory of each descendant of a process in bytes, and how many tasks they have together."""
    read: dict[int, dict[str, int]] = {}
    for name in os.listdir(proc):
        with suppress(OSError):
            if name.isdecimal():
                with open(
                    f"{name}/status", opener=lambda path, flags: os.open(path, flags, dir_fd=proc)
                ) as file:
                    read[int(name)] = {
                        key: int(value)
                        for key, value in re.findall(r"^(\w+):\s+(\d+)", file.read(), re.MULTILINE)
                    }
    found, new = dict[int, int](), {init}
    tasks = 0
    while new:
        new = {pid for pid, values in read.items() if values["PPid"] in new}
        tasks += sum(read[pid]["Threads"] for pid in new)
        found |= {pid: (read[pid].get("RssAnon", 0) + read[pid].get("RssShmem", 0)) << 10 for pid in new}
    return found, tasks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
