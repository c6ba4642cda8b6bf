"""An interpreter of a sandbox's agent, in its own process: runs cells, sends results, forks on request.

It exchanges frames with the agent, as the agent does with the host: two lengths, a JSON header, and bytes. Needs only
the standard library and `cells.py`, because the agent also runs in containers.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from openenv_core.sandbox.inside.cells import BACKEND, Cells, ShownBundles, describe

Furnish: TypeAlias = Callable[[str], None]

FRAME: Final = struct.Struct("!II")
FILE_PIECE: Final = 1 << 20

HOST: Final = 4
"""The descriptor, in interpreters, of the socket on which the host sends descriptors."""

MAX_DESCRIPTORS: Final = 64

REPEAT_SIGNAL: Final = signal.SIGURG
"""Repeats an interrupt, which has no effect if it arrives before the cell runs. Ignored if the first had one."""

SHOWN_BYTES: Final = 8 << 20
_FORMATS: Final = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/javascript": "javascript",
}


def receive(read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """Read one frame and return its header and bytes.

    Raises:
        EOFError: The other end is closed.
    """

    def exactly(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            piece = read(min(size - len(parts), FILE_PIECE))
            if not piece:
                raise EOFError
            parts += piece
        return bytes(parts)

    head, size = FRAME.unpack(exactly(FRAME.size))
    return json.loads(exactly(head)), exactly(size)


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    head = json.dumps(header, separators=(",", ":")).encode("utf-8", "replace")
    return FRAME.pack(len(head), len(blob)) + head + blob


def arrange(descriptors: list[int], kept: Iterable[int] = ()) -> None:
    """Renumber descriptors from 0 on, and close all others except those to keep."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, len(descriptors)) for each in descriptors]
    for place, descriptor in enumerate(high):
        os.dup2(descriptor, place, inheritable=place < 3)
    edge = len(descriptors)
    for descriptor in (*sorted(kept), 4096):
        os.closerange(edge, descriptor)
        edge = descriptor + 1


def _forked(control: socket.socket, furnish: Furnish, home: str, folder: str) -> bool:
    """Fork the interpreter with its state; return whether this is the copy, which is not a child of the agent."""
    with socket.socket(fileno=os.dup(HOST)) as host:
        _, descriptors, _, _ = socket.recv_fds(host, 1, MAX_DESCRIPTORS)
    seeded = random.getstate()  # Python reseeds in every fork
    if (between := os.fork()) != 0:
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        return False
    if (copy := os.fork()) != 0:
        control.sendall(pack({"process": copy}))
        os._exit(0)
    random.setstate(seeded)
    for place, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, place, inheritable=place < 3)
        os.close(descriptor)
    cwd = os.getcwd()
    furnish(folder)
    if cwd.startswith(home + "/"):
        os.chdir(folder + cwd[len(home) :])
    return True


class _Streamed(ShownBundles):
    """Bundles that are sent as soon as they are displayed."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(SHOWN_BYTES)
        self._send = send

    def add(self, kind: str, data: dict[str, str]) -> None:
        super().add(kind, data)
        while self.bundles:
            kind, data = self.bundles.pop()
            known = {_FORMATS[mime]: text for mime, text in data.items() if mime in _FORMATS}
            extra = {mime: text for mime, text in data.items() if mime not in _FORMATS}
            more = {"extra": extra} if extra else {}
            self._send({"type": "result", "is_main_result": kind == "execute_result", **known, **more})


def interpret(control: socket.socket, furnish: Furnish) -> None:
    """Run cells until the agent closes the socket, then exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    running = missed = False

    def interrupted(*_: object) -> None:
        nonlocal missed
        missed = not running
        if running:
            raise KeyboardInterrupt

    def repeated(*_: object) -> None:
        if running and missed:
            interrupted()

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(REPEAT_SIGNAL, repeated)
    os.environ.setdefault("MPLBACKEND", f"module://{BACKEND}")
    # Line-buffered, so that output streams, and stays in order with the output of subprocesses.
    out, err = (os.fdopen(each, "w", 1, "utf-8", "backslashreplace", closefd=False) for each in (1, 2))
    sys.stdout, sys.stderr = out, err
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    cells = Cells()
    cells.install()
    pid = os.getpid()

    def send(line: dict[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # code may have replaced the stream
                stream.flush()
        control.sendall(pack({}, json.dumps(line).encode("utf-8", "replace")))

    while True:
        try:
            header, _ = receive(control.recv)
        except (EOFError, OSError):
            os._exit(0)
        if "folder" in header:
            if _forked(control, furnish, header["home"], header["folder"]):
                pid = os.getpid()
            continue
        before = dict(os.environ)
        try:
            try:
                os.environ.update(header["envs"])
                running = True
                cells.run(header["code"], _Streamed(send))
            finally:
                running = False
        except BaseException as error:
            running = False  # for an interrupt that came after the cell, before the line above
            if not isinstance(error, SystemExit) or error.code:
                description = describe(error)
                text = "".join(description["traceback"])
                send(
                    {
                        "type": "error",
                        "name": description["ename"],
                        "value": description["evalue"],
                        "traceback": text,
                    }
                )
        if os.getpid() != pid:
            os._exit(0)  # the code has forked, and this process is not the interpreter
        for name in header["envs"]:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        send({"type": "number_of_executions", "execution_count": cells.count})
        control.sendall(pack({"end": True}))
