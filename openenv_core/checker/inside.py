"""Code that runs inside a server's processes and containers. Standard library only: it is also run as source text.

As `sitecustomize`, first on a server's path, in every Python process that the server starts: it notes whom the
process talks to and stops what is not allowed, or throws away its garbage when it is told to, so that what is left is
what is held.

In a container, as `python3 -c` with `look`, or with `collect` and the file in which processes note that they have
thrown their garbage away: what the server holds, as JSON on standard output. The processes are those that the
container's command started; what was brought in from outside, as this one and the health check were, is not the
server's.
"""

import _socket
import ctypes
import errno
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

OUT = "ROPEWALK_CHECK_NETWORK"
"""The variable that names the file of notes: one host a line."""

COLLECTED = "ROPEWALK_CHECK_COLLECTED"
"""The variable that names another file of notes: a process that has thrown its garbage away adds a line."""

HOSTS = "ROPEWALK_CHECK_HOSTS"
"""The variable with the hosts that are allowed, as a list in JSON."""

_COLLECT = signal.SIGUSR2
"""Tells a process to throw its garbage away."""

_COLLECT_TIMEOUT_S = 5.0
"""How long a process may take to do so, unless it is busy with something else."""

_OF_ADDRESSES = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
_OF_NAMES = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
_LOCAL = frozenset({"", "localhost", "localhost.localdomain", "ip6-localhost", "0.0.0.0", "::", "::1"})


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    host = host.lower().rstrip(".").partition("%")[0]
    return host in _LOCAL or host.startswith(("127.", "::ffff:127.")) or host == socket.gethostname().lower()


def is_allowed(host: str, allowed: list[str]) -> bool:
    """Whether a list has a host: by its name, or by `*.` and the end of it."""
    host = host.lower().rstrip(".")
    return any(
        host == pattern.lower() or (pattern.startswith("*.") and host.endswith(pattern[1:].lower()))
        for pattern in allowed
    )


def _is_address(host: str) -> bool:
    """Whether a host is given by its number."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, host.partition("%")[0])
            return True
    return False


def _host_in(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the host that an event of the interpreter is about; None where it is about none beyond this machine."""
    if event in _OF_NAMES:
        host = args[0]
    elif event in _OF_ADDRESSES and isinstance(args[1], tuple) and args[1]:
        host = args[1][0]
    else:
        return None
    if isinstance(host, (bytes, bytearray)):
        host = bytes(host).decode("ascii", "replace")
    if not isinstance(host, str) or is_local(host):
        return None
    # To look up a number asks nobody; to connect to it does.
    return None if event in _OF_NAMES and _is_address(host) else host


def _install_collecting(out: str) -> None:
    """Install a handler that collects garbage on request: Python's, and the allocator's free memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def collect(*_: object) -> None:
        gc.collect()
        if trim is not None:
            trim(0)
        _append_line(out, str(os.getpid()))

    with suppress(ValueError):  # not in the main thread: an interpreter inside of another
        signal.signal(_COLLECT, collect)


def _install_watching(out: str, allowed: list[str]) -> None:
    """Install an audit hook that records the hosts this process connects to, and blocks those not allowed."""
    resolved: set[str] = set()
    _record_lookups(resolved, allowed)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in _OF_NAMES and event not in _OF_ADDRESSES:
            return
        host = _host_in(event, args)
        if host is None or is_allowed(host, allowed):
            return
        if event in _OF_ADDRESSES and _normalise_address(host) in resolved:
            return  # what an allowed name was looked up for
        _append_line(out, host)
        raise OSError(errno.ENETUNREACH, f"the manifest's network policy does not allow {host}")

    _append_line(out, "")  # tells that somebody looks
    sys.addaudithook(hook)


def _record_lookups(resolved: set[str], allowed: list[str]) -> None:
    """Keep the addresses that are answered where an allowed name is looked up: events come before answers."""

    def record_lookups(
        lookup: Callable[..., Any], addresses: Callable[[Any], Iterable[str]]
    ) -> Callable[..., Any]:
        @wraps(lookup)
        def wrapper(host: Any, *args: Any, **options: Any) -> Any:
            answer = lookup(host, *args, **options)
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
            if isinstance(name, str) and is_allowed(name, allowed):
                resolved.update(map(_normalise_address, addresses(answer)))
            return answer

        return wrapper

    # `socket.getaddrinfo` calls the one of the extension by its module.
    extension: Any = _socket
    extension.getaddrinfo = record_lookups(
        extension.getaddrinfo, lambda answer: (info[4][0] for info in answer)
    )
    module: Any = socket
    module.gethostbyname = record_lookups(module.gethostbyname, lambda answer: (answer,))
    module.gethostbyname_ex = record_lookups(module.gethostbyname_ex, lambda answer: answer[2])


def _normalise_address(address: str) -> str:
    return str(address).partition("%")[0].lower().removeprefix("::ffff:")


def _append_line(out: str, line: str) -> None:
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _run_next() -> None:
    """Run the `sitecustomize` that this one stands before."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def usage(pids: "Iterable[int]") -> "dict[str, int]":
    """Return the bytes of memory, threads, open files and sockets of processes, and how many of them live."""
    totals = {"memory": 0, "threads": 0, "files": 0, "processes": 0}
    for pid in pids:
        try:
            status = _status(pid)
            memory, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, KeyError):  # it has ended, or is the container's own init, which is somebody else's
            continue
        for name, value in (("memory", memory), ("threads", threads), ("files", files), ("processes", 1)):
            totals[name] += value
    return totals


def collect_garbage(pids: "Iterable[int]", notes: str) -> int:
    """Signal the processes to collect garbage, and wait until they have; return how many were signalled."""
    with open(notes, "w", encoding="utf-8"):
        pass
    signalled = 0
    for pid in pids:
        # The signal would end one that has no handler for it.
        with suppress(OSError, KeyError):
            if int(_status(pid)["SigCgt"], 16) >> (_COLLECT - 1) & 1:
                os.kill(pid, _COLLECT)
                signalled += 1
    deadline = time.monotonic() + _COLLECT_TIMEOUT_S
    while time.monotonic() < deadline:
        with open(notes, encoding="utf-8") as file:
            if len(file.read().split()) >= signalled:
                break
        time.sleep(0.01)
    return signalled


def descendants(pid: int) -> "list[int]":
    """Return the processes that descend from one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, KeyError):
                parents[int(name)] = int(_status(int(name))["PPid"])
    pids = [pid]
    for parent_pid in pids:
        pids += [child for child, parent in parents.items() if parent == parent_pid]
    return pids[1:]


def _status(pid: int) -> "dict[str, str]":
    """Return the kernel's status of a process."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}


def _main(operation: str, notes: str = "") -> None:
    pids = [1, *descendants(1)]
    result = {"told": collect_garbage(pids, notes)} if operation == "collect" else usage(pids)
    sys.stdout.write(json.dumps(result))


if __name__ == "sitecustomize":
    if OUT in os.environ:
        _install_watching(os.environ[OUT], json.loads(os.environ.get(HOSTS, "[]")))
    if COLLECTED in os.environ:
        _install_collecting(os.environ[COLLECTED])
    _run_next()
if __name__ == "__main__":
    _main(*sys.argv[1:])
