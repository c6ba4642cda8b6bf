"""Put first on a server's path as `sitecustomize`: what an interpreter does for the checker.

It notes whom its process talks to and stops what is not allowed, or throws away its garbage when it is told to, so
that what is left is what is held. Standard library alone: it runs before anything else, and in every Python process
that the server starts.
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

COLLECT = signal.SIGUSR2
"""Tells a process to throw its garbage away."""

HOSTS = "ROPEWALK_CHECK_HOSTS"
"""The variable with the hosts that are allowed, as a list in JSON."""

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
        host == one.lower() or (one.startswith("*.") and host.endswith(one[1:].lower())) for one in allowed
    )


def is_address(host: str) -> bool:
    """Whether a host is given by its number."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return True
    return False


def host_in(event: str, args: tuple[Any, ...]) -> str | None:
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
    return None if event in _OF_NAMES and is_address(host) else host


def install_collecting(out: str) -> None:
    """Begin to throw garbage away when told to: what Python would some time, and what the allocator keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def collect(*_: object) -> None:
        gc.collect()
        if trim is not None:
            trim(0)
        _note(out, str(os.getpid()))

    with suppress(ValueError):  # not in the main thread: an interpreter inside of another
        signal.signal(COLLECT, collect)


def install_watching(out: str, allowed: list[str]) -> None:
    """Begin to note whom this process talks to, and to stop what is not allowed."""
    found: set[str] = set()
    _record_answers(found, allowed)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in _OF_NAMES and event not in _OF_ADDRESSES:
            return
        host = host_in(event, args)
        if host is None:
            return
        if is_allowed(host, allowed):
            return
        if event in _OF_ADDRESSES and _plain(host) in found:
            return  # what an allowed name was looked up for
        _note(out, host)
        raise OSError(errno.ENETUNREACH, f"the manifest's network policy does not allow {host}")

    _note(out, "")  # tells that somebody looks
    sys.addaudithook(hook)


def _record_answers(found: set[str], allowed: list[str]) -> None:
    """Keep the addresses that are answered where an allowed name is looked up: events come before answers."""

    def recording(look: Callable[..., Any], addresses: Callable[[Any], Iterable[str]]) -> Callable[..., Any]:
        @wraps(look)
        def recorded(host: Any, *args: Any, **options: Any) -> Any:
            answer = look(host, *args, **options)
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
            if isinstance(name, str) and is_allowed(name, allowed):
                found.update(map(_plain, addresses(answer)))
            return answer

        return recorded

    # `socket.getaddrinfo` calls the one of the extension by its module.
    extension: Any = _socket
    extension.getaddrinfo = recording(extension.getaddrinfo, lambda answer: (one[4][0] for one in answer))
    whole: Any = socket
    whole.gethostbyname = recording(whole.gethostbyname, lambda answer: (answer,))
    whole.gethostbyname_ex = recording(whole.gethostbyname_ex, lambda answer: answer[2])


def _plain(address: str) -> str:
    return str(address).partition("%")[0].lower().removeprefix("::ffff:")


def _note(out: str, line: str) -> None:
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def run_next() -> None:
    """Run the `sitecustomize` that this one stands before."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if place != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    if OUT in os.environ:
        install_watching(os.environ[OUT], json.loads(os.environ.get(HOSTS, "[]")))
    if COLLECTED in os.environ:
        install_collecting(os.environ[COLLECTED])
    run_next()
