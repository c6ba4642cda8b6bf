"""Landlock: which files a process may reach at all, whatever their owners and modes allow."""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import libc

_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1
# Denials are a session's daily life: they must not fill the machine's audit log. Since ABI 7.
_QUIET = 0b101

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15

_FIRST_RIGHTS = (1 << 13) - 1
_REFER = 1 << 13
_BIND_AND_CONNECT = 0b11
_ABSTRACT_UNIX_AND_SIGNAL = 0b11

TRUNCATION_SINCE = 3
"""Below this ABI a file outside can be emptied by its name; only a uid of its own stops that."""
SIGNALS_SINCE = 6
"""From this ABI on, no signal leaves the session."""


def abi() -> int:
    """The version of Landlock that the kernel offers; 0 where there is none."""
    try:
        return libc.call("landlock_create_ruleset", None, 0, _CREATE_VERSION)
    except OSError:
        return 0


def handled_rights(version: int) -> int:
    """Every right on files that a version of Landlock knows: what no rule grants is refused."""
    rights = _FIRST_RIGHTS
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= since:
            rights |= right
    return rights


@dataclass(frozen=True)
class Prepared:
    """Rules for reading that serve every session; made once by `prepare`.

    Attributes:
        entries: Each as the kernel takes it; the descriptors in them have to stay open.
    """

    entries: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class LandlockRules:
    """What may be reached: paths, or O_PATH descriptors that were opened before.

    Attributes:
        read_only: Files and directories that may be read, with all beneath. Give `prepare` what sessions have
            in common: three hundred entries then cost 0.3 ms a session and not 1.5 ms.
        writable: Directories in which anything may be done but making devices, sockets and pipes; single
            files may be written.
        execute: Programs may be executed (mapping libraries needs no right); `prepare` is told by itself.
    """

    read_only: Sequence[int | str] | Prepared = ()
    writable: Sequence[int | str] = ()
    execute: bool = False


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


# What never appears in a workspace: character and block devices, sockets, named pipes.
_MAKE_SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11
_READ = _READ_FILE | _READ_DIR
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def _ruleset(version: int) -> int:
    attributes = _Ruleset(
        handled_rights(version),
        _BIND_AND_CONNECT if version >= 4 else 0,
        _ABSTRACT_UNIX_AND_SIGNAL if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    return libc.call(
        "landlock_create_ruleset", ctypes.byref(attributes), size, 0, step="creating a Landlock ruleset"
    )


def open_path(path: str) -> int:
    """A descriptor that a rule can name a path by."""
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"Landlock rule for {path}: {error.strerror}") from None


def _encoded(descriptor: int, rights: int) -> bytes:
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _ON_FILES
    return struct.pack("=Qi", rights, descriptor)  # struct landlock_path_beneath_attr, which is packed


def prepare(read_only: Sequence[int], *, execute: bool = False) -> Prepared:
    """Look at the descriptors that every session may read beneath, once for all of them."""
    rights = _READ | (_EXECUTE if execute else 0)
    return Prepared(tuple(_encoded(descriptor, rights) for descriptor in read_only))


def _add(ruleset: int, entries: Sequence[bytes], described: str) -> None:
    add_rule = libc.number_of("landlock_add_rule")
    for entry in entries:
        libc.call_number(add_rule, ruleset, _RULE_PATH_BENEATH, entry, 0, step=described)


def _add_each(ruleset: int, entries: Sequence[int | str], rights: int) -> None:
    for entry in entries:
        descriptor = open_path(entry) if isinstance(entry, str) else entry
        try:
            _add(ruleset, [_encoded(descriptor, rights)], f"Landlock rule for {entry}")
        finally:
            if isinstance(entry, str):
                os.close(descriptor)


def restrict(rules: LandlockRules) -> int:
    """Restrict this thread, and what it starts, to the rules; cannot be taken back.

    Returns:
        The version of Landlock that was used; what it lacks is said by `TRUNCATION_SINCE` and `SIGNALS_SINCE`.

    Raises:
        OSError: There is no Landlock, or a rule was refused: a missing path too, so leave those out.
    """
    version = abi()
    if version < 1:
        raise OSError(errno.ENOSYS, "Landlock: the kernel has none, or it is switched off")
    handled = handled_rights(version)
    execute = _EXECUTE if rules.execute else 0
    write = handled & ~(_MAKE_SPECIAL | _IOCTL_DEV | _EXECUTE) | execute
    ruleset = _ruleset(version)
    try:
        if isinstance(rules.read_only, Prepared):
            _add(ruleset, rules.read_only.entries, "Landlock rule for what sessions have in common")
        else:
            _add_each(ruleset, rules.read_only, _READ | execute)
        _add_each(ruleset, rules.writable, write)
        libc.no_new_privileges()
        libc.call(
            "landlock_restrict_self", ruleset, _QUIET if version >= 7 else 0, step="restricting by Landlock"
        )
    finally:
        os.close(ruleset)
    return version
