"""What stands around a session and must not be touched: canaries that only look like prey."""

import asyncio
import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import openenv_core
from openenv_core.sandbox.kernel.syscalls import current

SECRET: Final = f"CANARY-{secrets.token_hex(16)}"
"""In the server's environment, its memory and its files; seen anywhere else, something has leaked."""

KEPT: Final = "to be kept\n"
_SHARED_MEMORY_KEY: Final = 0x52570000 | (os.getpid() & 0xFFFF)
_VICTIM: Final = "import signal, time; signal.signal(signal.SIGCONT, signal.SIG_IGN); time.sleep(100_000)"


class Surroundings:
    """Files, servers, shared memory and a process, which nobody but an intruder would touch.

    All of it is open to everybody: nothing but the sandbox stands before it.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ropewalk-canaries-"))
        self._sockets: list[socket.socket] = []
        self._ports: dict[str, int] = {}
        self._abstract = f"ropewalk-canary-{secrets.token_hex(4)}"
        self._segment: int | None = None
        self._victim: subprocess.Popen[bytes] | None = None
        self._before: dict[str, Any] = {}
        self._visitors: list[str] = []

    async def __aenter__(self) -> Self:
        os.environ["ROPEWALK_ATTACK_CANARY"] = SECRET
        self._folder.chmod(0o755)
        (self._folder / "secret").write_text(SECRET)
        (self._folder / "writable").write_text(KEPT)
        (self._folder / "writable").chmod(0o666)
        (self._folder / "open").mkdir()
        (self._folder / "open").chmod(0o777)
        self._listen()
        self._share_memory()
        self._victim = await asyncio.to_thread(
            subprocess.Popen, [sys.executable, "-I", "-c", _VICTIM], stdin=subprocess.DEVNULL
        )
        self._before = self._state()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each.fileno())
            each.close()
        if self._victim is not None:
            self._victim.kill()
            self._victim.wait()
        if self._segment is not None:
            ctypes.CDLL(None).shmctl(self._segment, 0, None)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.environ.pop("ROPEWALK_ATTACK_CANARY", None)

    def host(self, zygote: int | None) -> dict[str, Any]:
        """Return what code is told; not the secret."""
        assert self._victim is not None
        package = Path(openenv_core.__file__).parent
        return {
            "calls": dict(current().numbers),
            "isolation": "",
            "supervisor": os.getpid(),
            "zygote": zygote or 0,
            "victim": self._victim.pid,
            "pids": [os.getpid(), zygote or 1, self._victim.pid],
            "folder": str(self._folder),
            "canary": str(self._folder / "secret"),
            "writable": str(self._folder / "writable"),
            "secret_files": self._secret_files(),
            "ours": [str(package), f"{package}/sandbox/inside/runner.py", str(package.parent / "tests")],
            "unix": str(self._folder / "stream"),
            "unix_datagram": str(self._folder / "datagram"),
            "abstract": self._abstract,
            "hostname": socket.gethostname(),
            "shared_memory": _SHARED_MEMORY_KEY,
            "deep": 500,
            **self._ports,
        }

    def damage(self) -> list[str]:
        """Return what has happened to all this since the start, in words. Blocks for a moment."""
        damages, now = list(self._visitors), self._state()
        for name, before in self._before.items():
            if now[name] != before:
                damages.append(f"{name} was {before}, is {now[name]}")
        return damages

    def _secret_files(self) -> list[str]:
        home = os.path.expanduser("~")
        paths = ["/etc/shadow", "/etc/passwd", "/etc/hosts", "/etc/ssl/openssl.cnf"]
        paths += [f"{home}/.bashrc", f"{home}/.profile", "/proc/self/environ", "/proc/1/environ"]
        paths += [f"/proc/{place}/etc/passwd" for place in ("1/root", "self/root", "self/cwd/../..")]
        return [*paths, "/dev/mem", "/boot", "/var/log/dpkg.log", __file__]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path in sorted(self._folder.rglob("*")):
            status = path.lstat()
            kept = ("st_mode", "st_uid", "st_size", "st_mtime_ns", "st_nlink")
            state[path.name] = tuple(getattr(status, name) for name in kept)
        state["content"] = (self._folder / "writable").read_text()
        state["names"] = sorted(str(path) for path in self._folder.rglob("*"))
        assert self._victim is not None
        for name, pid in (("supervisor", os.getpid()), ("victim", self._victim.pid)):
            state[f"{name}'s priority"] = os.getpriority(os.PRIO_PROCESS, pid)
            state[f"{name}'s processors"] = sorted(os.sched_getaffinity(pid))
            limits = [limit for limit in dir(resource) if limit.startswith("RLIMIT_")]
            state[f"{name}'s limits"] = [resource.prlimit(pid, getattr(resource, one)) for one in limits]
        state["victim's state"] = _state_of(self._victim.pid)
        state["hostname"] = socket.gethostname()
        state["umask"] = Path("/proc/self/status").read_text().partition("Umask:")[2][:6]
        return state

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("tcp", socket.AF_INET6, socket.SOCK_STREAM, ("::1", None)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET6, socket.SOCK_DGRAM, ("::1", None)),
            ("", socket.AF_UNIX, socket.SOCK_STREAM, str(self._folder / "stream")),
            ("", socket.AF_UNIX, socket.SOCK_DGRAM, str(self._folder / "datagram")),
            ("", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self._abstract}"),
        ):
            one = socket.socket(family, kind)
            if isinstance(address, tuple) and address[1] is None:
                address = (address[0], self._ports[name])
            try:
                one.bind(address)
            except OSError:  # no IPv6 here, or its port is taken
                one.close()
                continue
            if name and family == socket.AF_INET:
                self._ports[name] = one.getsockname()[1]
            if isinstance(address, str) and address.startswith("/"):
                os.chmod(address, 0o777)
            one.setblocking(False)
            if kind == socket.SOCK_STREAM:
                one.listen()
            self._sockets.append(one)
            loop.add_reader(one.fileno(), self._visited, one, kind, str(address))

    def _visited(self, one: socket.socket, kind: int, name: str) -> None:
        with contextlib.suppress(OSError):
            if kind == socket.SOCK_STREAM:
                one.accept()[0].close()
            else:
                one.recv(100)
            self._visitors.append(f"somebody came to {name!r}")

    def _share_memory(self) -> None:
        libc = ctypes.CDLL(None)
        segment = libc.shmget(_SHARED_MEMORY_KEY, 4096, 0o1666)
        if segment >= 0:
            self._segment = segment


def _state_of(pid: int) -> str:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "alive" if state in "SRD" else f"in state {state}"


def descendants(of: int | None) -> dict[int, str]:
    """Return the processes below one, with their states."""
    if of is None:
        return {}
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = (int(fields[1]), fields[0])
    commands: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for pid, (parent, state) in parents.items():
            if pid not in commands and (parent == of or parent in commands):
                commands[pid], grown = state, True
    return commands
