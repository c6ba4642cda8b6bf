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
"""Repeats an interrupt, which has no effect if it arrives before the code runs. Ignored if the first had one."""

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


# Kept here, because code may replace them in their own modules.
_dumps = json.dumps
_loads = json.loads


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read a number of bytes.

    Raises:
        EOFError: The other end is closed.
    """
    parts = bytearray()
    while len(parts) < size:
        piece = read(min(size - len(parts), FILE_PIECE))
        if not piece:
            raise EOFError
        parts += piece
    return bytes(parts)


def receive(read: Callable[[int], bytes]) -> tuple[dict[str, Any], bytes]:
    """Read one frame and return its header and bytes; raises as `read_exactly` does."""
    head, size = FRAME.unpack(read_exactly(read, FRAME.size))
    return _loads(read_exactly(read, head)), read_exactly(read, size)


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return the bytes of a frame. Lone surrogates, which file names may contain, arrive as they are."""
    text = _dumps(header, ensure_ascii=False, separators=(",", ":"))
    head = text.encode("utf-8", "surrogatepass")
    return FRAME.pack(len(head), len(blob)) + head + blob


def move_descriptors(descriptors: list[int], *, first: int) -> None:
    """Renumber descriptors from `first` on; only standard streams are inheritable."""
    beyond = first + len(descriptors)
    # First to high numbers, so that they do not overwrite each other.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, beyond) for each in descriptors]
    for descriptor in set(descriptors).difference(range(first, beyond)):
        os.close(descriptor)
    for place, descriptor in enumerate(moved, first):
        os.dup2(descriptor, place, inheritable=place < 3)
        os.close(descriptor)


def place_descriptors(descriptors: list[int], kept: Iterable[int] = ()) -> None:
    """Renumber descriptors from 0 on, and close all others except those to keep."""
    move_descriptors(descriptors, first=0)
    edge = len(descriptors)
    for descriptor in (*sorted(kept), 4096):
        os.closerange(edge, descriptor)
        edge = descriptor + 1


# Kept here, because code may replace them in their own module.
_set_handler = signal.signal
_get_handler = signal.getsignal
_raise = signal.raise_signal


class Interrupts:
    """Handles SIGINT, during requests and between them.

    A handler that code has installed is active only while its code runs. Between requests, where nothing would catch
    what it raises, this class's handler replaces it.
    """

    def __init__(self) -> None:
        self._our_handler = self._on_interrupt
        self._user_handler: Any = None
        self._handlers_installed = False
        self._runs = False
        self._interrupt_pending = False

    def install(self) -> None:
        """Install the handlers."""
        _set_handler(signal.SIGINT, self._our_handler)
        _set_handler(REPEAT_SIGNAL, self._on_repeat)
        self._handlers_installed = True

    def reset(self) -> None:
        """Discard a missed interrupt, in a fork: it was meant for the head; the fork receives its own."""
        self._interrupt_pending = False

    def begin(self) -> None:
        """Note that code runs. The code's handler is installed first, or an interrupt raised here would lose it."""
        if self._user_handler is not None:
            _set_handler(signal.SIGINT, self._user_handler)
            self._user_handler = None
        self._runs = True

    def end(self) -> None:
        """Note that no code runs. Idempotent, because the code's handler may raise here."""
        self._runs = False
        if self._handlers_installed and (handler := _get_handler(signal.SIGINT)) is not self._our_handler:
            self._user_handler = handler
            _set_handler(signal.SIGINT, self._our_handler)

    def _on_interrupt(self, *_: object) -> None:
        self._interrupt_pending = not self._runs
        if self._runs:
            raise KeyboardInterrupt

    def _on_repeat(self, *_: object) -> None:
        if self._runs and self._interrupt_pending:
            self._interrupt_pending = False
            _raise(signal.SIGINT)


def _forked(control: socket.socket, furnish: Furnish, home: str, folder: str) -> bool:
    """Fork the interpreter with its state; return whether this is the copy, which is not a child of the agent."""
    with socket.socket(fileno=os.dup(HOST)) as host:
        _, descriptors, _, _ = socket.recv_fds(host, 1, MAX_DESCRIPTORS)
    random_state = random.getstate()  # Python reseeds in every fork
    if (middle_pid := os.fork()) != 0:
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle_pid, 0)
        return False
    if (copy := os.fork()) != 0:
        control.sendall(pack({"process": copy}))
        os._exit(0)
    random.setstate(random_state)
    move_descriptors(descriptors, first=1)
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
            line: dict[str, Any] = {"type": "result", "is_main_result": kind == "execute_result"}
            line.update((_FORMATS[mime], data.pop(mime)) for mime in _FORMATS if mime in data)
            self._send({**line, "extra": data} if data else line)


def interpret(control: socket.socket, furnish: Furnish) -> None:
    """Run cells until the agent closes the socket, then exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    interrupts = Interrupts()
    interrupts.install()
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
                interrupts.begin()
                cells.run(header["code"], _Streamed(send))
            finally:
                interrupts.end()
        except BaseException as error:
            interrupts.end()  # for an interrupt that came after the cell, before the line above
            if not isinstance(error, SystemExit) or error.code:
                name, value, traceback = describe(error).values()
                send({"type": "error", "name": name, "value": value, "traceback": "".join(traceback)})
        if os.getpid() != pid:
            os._exit(0)  # the code has forked, and this process is not the interpreter
        for name in header["envs"]:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        send({"type": "number_of_executions", "execution_count": cells.count})
        control.sendall(pack({"end": True}))
