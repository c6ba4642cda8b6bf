"""System calls by name, through the C library and ctypes. Failures raise OSError."""

import ctypes
import os
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from .syscalls import current

_PR_SET_PDEATHSIG = 1
_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_SIGACTION_BYTES = 64
_SIGNAL_SET_BYTES = 8
_NO_CHILD_STOP = 1
_FLAGS = struct.Struct("=Q")


@lru_cache(maxsize=1)
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def call(name: str, *arguments: Any, step: str | None = None) -> int:
    """Make a system call by name.

    Args:
        name: The call's name.
        arguments: Integers, strings and bytes (passed as NUL-terminated strings), None (a null pointer) or ctypes
            objects.
        step: A description for the error; the name by default.
    """
    result = int(_syscall()(ctypes.c_long(current().numbers[name]), *map(_to_argument, arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{step or name}: {os.strerror(code)}")
    return result


def _to_argument(value: Any) -> Any:
    # syscall() is variadic: an int would be passed as 32 bits, with undefined upper bits.
    if isinstance(value, int):
        return ctypes.c_long(value)
    return os.fsencode(value) if isinstance(value, str) else value


def call_each(name: str, first: int, second: int, values: Iterable[bytes], *, step: str) -> None:
    """Make a system call with each of many values as its third argument and 0 as its fourth, at little overhead."""
    syscall, number, end = _syscall(), ctypes.c_long(current().numbers[name]), ctypes.c_long(0)
    before = ctypes.c_long(first), ctypes.c_long(second)
    for value in values:
        if syscall(number, *before, value, end) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{step}: {os.strerror(code)}")


def prctl(option: int, second: int = 0, *, step: str) -> int:
    """Call prctl with unused arguments set to zero, as its newer options require."""
    return call("prctl", option, second, 0, 0, 0, step=step)


def no_new_privileges() -> None:
    """Set no_new_privs permanently: executed programs gain no privileges."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, step="no_new_privs")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that created it ends.

    Call it after changing user and capabilities, which clears the setting. A parent that has already ended is not
    noticed, so check os.getppid() afterwards.
    """
    prctl(_PR_SET_PDEATHSIG, number, step="parent-death signal")


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of the same uid may access this process's /proc entries and memory."""
    prctl(_PR_SET_DUMPABLE, int(dumpable), step="dumpable")


def is_dumpable() -> bool:
    """Return whether this process is dumpable; see `set_dumpable`."""
    return prctl(_PR_GET_DUMPABLE, step="reading dumpable") == 1


def become_subreaper() -> None:
    """Have orphaned descendants reparented to this process, so that it can reap them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, step="child subreaper")


def receive_only_sigchld() -> None:
    """Have SIGCHLD sent only when a child ends, not when one is stopped or resumed.

    Call it after setting Python's handler: Python cannot set this flag, and setting a handler clears it.
    """
    # The kernel's struct sigaction: the handler, the flags, and fields that are kept.
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    step = "setting SA_NOCLDSTOP"
    call("rt_sigaction", signal.SIGCHLD, None, action, _SIGNAL_SET_BYTES, step=step)
    (flags,) = _FLAGS.unpack_from(action, _FLAGS.size)
    _FLAGS.pack_into(action, _FLAGS.size, flags | _NO_CHILD_STOP)
    call("rt_sigaction", signal.SIGCHLD, action, None, _SIGNAL_SET_BYTES, step=step)


def close_from(lowest: int) -> None:
    """Close every descriptor from a number on, including those beyond the limit of open files."""
    call("close_range", lowest, 0xFFFF_FFFF, 0, step=f"closing descriptors from {lowest}")


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor after the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_file(path: str | Path, content: str, *, dir_fd: int | None = None) -> None:
    """Write to a kernel file in one call; an error names the content and the file."""
    try:
        with closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)) as descriptor:
            os.write(descriptor, content.encode())
    except OSError as error:
        raise OSError(error.errno, f"writing {content!r} to {path}: {error.strerror}") from None
