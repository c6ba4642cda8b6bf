"""Code that runs inside a server's processes and containers. Standard library only: it is also run as source text.

As `sitecustomize`, first on the server's path, it runs in every Python process of the server. It records the hosts that
the process connects to and blocks those not allowed, or collects garbage on a signal, so that only memory in use is
measured.

In a container it runs as `python3 -c` with `look`, or with `collect` and the file in which processes record that they
have collected garbage. It prints the server's resources as JSON. The server's processes are those that the container's
command has started; those executed from outside, like this one and the health check, do not count.
"""

import _socket
import ctypes
import errno
import gc
import json
import os
import re
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
"""Environment variable with the path of the file of recorded hosts, one per line."""

COLLECTED = "ROPEWALK_CHECK_COLLECTED"
"""Environment variable with the path of another file: a process that has collected garbage adds a line."""

HOSTS = "ROPEWALK_CHECK_HOSTS"
"""Environment variable with the allowed hosts, as a JSON list."""

_COLLECT = signal.SIGUSR2
"""Makes a process collect garbage."""

_COLLECT_TIMEOUT_S = 5.0
"""Seconds to wait for that; a busy process takes longer."""

_OF_ADDRESSES = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
_OF_NAMES = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
_LOOPBACK = re.compile(r"(::ffff:)?127(\.\d+){1,3}")
_LOCAL = frozenset({"", "localhost", "localhost.localdomain", "ip6-localhost", "0.0.0.0", "::", "::1"})


def is_local(host: str) -> bool:
    """Return whether a name or an address is this machine's own."""
    host = host.lower().rstrip(".").partition("%")[0]
    return host in _LOCAL or _LOOPBACK.fullmatch(host) is not None or host == socket.gethostname().lower()


def is_allowed(host: str, allowed: list[str]) -> bool:
    """Return whether a list contains a host, by its name or by `*.` and a suffix."""
    host = host.lower().rstrip(".")
    return any(
        host == pattern.lower() or (pattern.startswith("*.") and host.endswith(pattern[1:].lower()))
        for pattern in allowed
    )


def _is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, host.partition("%")[0])
            return True
    return False


def _host_in(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the remote host that an audit event refers to, if any."""
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
    # Looking up an IP address contacts no host; connecting to it does.
    return None if event in _OF_NAMES and _is_address(host) else host


def _install_collecting(path: str) -> None:
    """Install a signal handler that collects garbage and returns the allocator's free memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def collect(*_: object) -> None:
        gc.collect()
        if trim is not None:
            trim(0)
        _append_line(path, str(os.getpid()))

    with suppress(ValueError):  # not in the main thread: a subinterpreter
        signal.signal(_COLLECT, collect)


def _install_watching(path: str, allowed: list[str]) -> None:
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
            return  # the address of an allowed name
        _append_line(path, host)
        raise OSError(errno.ENETUNREACH, f"the manifest's network policy does not allow {host}")

    _append_line(path, "")  # shows that the process is watched
    sys.addaudithook(hook)


def _record_lookups(resolved: set[str], allowed: list[str]) -> None:
    """Record the addresses of allowed names. The lookup functions are wrapped, because audit events have no results."""

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

    # `socket.getaddrinfo` calls the extension's function through its module.
    extension: Any = _socket
    extension.getaddrinfo = record_lookups(
        extension.getaddrinfo, lambda answer: (info[4][0] for info in answer)
    )
    module: Any = socket
    module.gethostbyname = record_lookups(module.gethostbyname, lambda answer: (answer,))
    module.gethostbyname_ex = record_lookups(module.gethostbyname_ex, lambda answer: answer[2])


def _normalise_address(address: str) -> str:
    return str(address).partition("%")[0].lower().removeprefix("::ffff:")


def _append_line(path: str, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one shadows."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != own_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def usage(pids: "Iterable[int]") -> "dict[str, int]":
    """Return the total memory in bytes, threads, and open files and sockets of processes, and the number alive."""
    totals = {"memory": 0, "threads": 0, "files": 0, "processes": 0}
    for pid in pids:
        try:
            status = _status(pid)
            memory, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, KeyError):  # it has ended, or is the container's init, run by another user
            continue
        for name, value in (("memory", memory), ("threads", threads), ("files", files), ("processes", 1)):
            totals[name] += value
    return totals


def collect_garbage(pids: "Iterable[int]", notes: str) -> int:
    """Signal processes to collect garbage, and wait for them; return the number signalled."""
    with open(notes, "w", encoding="utf-8"):
        pass
    signal_count = 0
    for pid in pids:
        # The signal would kill a process without a handler.
        with suppress(OSError, KeyError):
            if int(_status(pid)["SigCgt"], 16) >> (_COLLECT - 1) & 1:
                os.kill(pid, _COLLECT)
                signal_count += 1
    deadline = time.monotonic() + _COLLECT_TIMEOUT_S
    while time.monotonic() < deadline:
        with open(notes, encoding="utf-8") as file:
            if len(file.read().split()) >= signal_count:
                break
        time.sleep(0.01)
    return signal_count


def descendants(pid: int) -> "list[int]":
    """Return the descendants of a process."""
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
    """Return the fields of a process's /proc status."""
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
    _run_next_sitecustomize()
if __name__ == "__main__":
    _main(*sys.argv[1:])
