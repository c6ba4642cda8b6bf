"""Filters on system calls: assembled from a policy, installed for good."""

import ctypes
import errno
import struct
from dataclasses import replace
from functools import lru_cache

from . import libc
from .bpf import answer, decide, program
from .policy import Policy, verdicts
from .syscalls import Architecture, current

__all__ = ["Policy", "assemble", "install"]

_SET_MODE_FILTER = 1
_TSYNC = 1
_SPEC_ALLOW = 4
_INSTRUCTION_BYTES = 8


# No process has it: numbers end at 2**22. No rule compares anything else with it.
_SOME_PID = 0x5EED_C0DE


def assemble(policy: Policy, architecture: Architecture | None = None) -> bytes:
    """The filter of a policy.

    Args:
        policy: What the session may do.
        architecture: Whose numbers to use; this machine's by default.
    """
    if policy.pid is None:
        return _assembled(policy, architecture)
    # Sessions differ in their pid alone, and putting a filter together takes some milliseconds.
    template = _assembled(replace(policy, pid=_SOME_PID), architecture)
    return template.replace(_operand(_SOME_PID), _operand(policy.pid))


def _operand(value: int) -> bytes:
    return struct.pack("=I", value)


@lru_cache(maxsize=64)
def _assembled(policy: Policy, architecture: Architecture | None) -> bytes:
    architecture = architecture or current()
    absent = answer(errno.ENOSYS)  # gaps in the table, and everything younger than it
    tree = decide(verdicts(policy, architecture), lambda _number: absent, architecture.last)
    return program(architecture.audit, architecture.foreign_from, tree)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(filter_code: bytes) -> None:
    """Install a filter on every thread of this process, after no_new_privs; it cannot be taken away again.

    Raises:
        OSError: The kernel refused the filter.
    """
    libc.no_new_privileges()
    held = ctypes.create_string_buffer(filter_code, len(filter_code))
    fprog = _Program(len(filter_code) // _INSTRUCTION_BYTES, ctypes.addressof(held))
    # SPEC_ALLOW: kernels before 5.16 slow every filtered process down otherwise, loops of Python included.
    flags = _TSYNC | _SPEC_ALLOW
    stray = libc.call("seccomp", _SET_MODE_FILTER, flags, ctypes.byref(fprog), step="seccomp filter")
    if stray:
        raise OSError(
            errno.EBUSY, f"seccomp filter: thread {stray} has another filter and cannot take this one"
        )
