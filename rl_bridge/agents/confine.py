"""Runs a program that sees only some folders and one port: in namespaces of its own, without privileges.

    python -m rl_bridge.agents.confine SOCKET COMMAND...

SOCKET is a descriptor of a socket, from which a `Confinement` is read as JSON, to its end. The socket that listens in
the program's network is sent back over it, and whoever gets that decides where connections go.
"""

import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Final

from openenv_core.sandbox.kernel import identity, libc, namespaces, seccomp
from openenv_core.sandbox.kernel.syscalls import current

FOLDER: Final = namespaces.WORKSPACE
"""The program's folder: in memory, and gone with the program."""
MAX_DISK_BYTES: Final = 1 << 30
MAX_FILES: Final = 100_000
BACKLOG: Final = 128

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
    """

    shown: Sequence[str]
    hidden: Sequence[str]
    files: Mapping[str, str]
    port: int

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(
            {"shown": self.shown, "hidden": self.hidden, "files": dict(self.files), "port": self.port}
        ).encode()


def main(arguments: Sequence[str]) -> int:
    """Confine a program and run it; returns its exit code, 128 more than the signal that killed it."""
    with socket.socket(fileno=int(arguments[0])) as link:
        parts = []
        while part := link.recv(1 << 16):
            parts.append(part)
        spec = Confinement(**json.loads(b"".join(parts)))
        namespaces.enter_outer(privileged=False)
        with _listen(spec.port) as listener:
            socket.send_fds(link, [b"."], [listener.fileno()])
    init = os.fork()
    if init == 0:
        libc.die_with_parent()
        _become_init(spec, arguments[1:])
    return _wait_for(init)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
