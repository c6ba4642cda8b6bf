"""Code that runs inside a server's processes. Standard library only: it is copied as `sitecustomize`.

First on the server's path, that runs in every Python process of the server. It records the hosts that the process
connects to and blocks those not allowed, or collects garbage on a signal, so that only memory in use is measured.
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

COLLECT = signal.SIGUSR2
"""Makes a process collect garbage."""

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
        signal.signal(COLLECT, collect)


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


if __name__ == "sitecustomize":
    if OUT in os.environ:
        _install_watching(os.environ[OUT], json.loads(os.environ.get(HOSTS, "[]")))
    if COLLECTED in os.environ:
        _install_collecting(os.environ[COLLECTED])
    _run_next_sitecustomize()
