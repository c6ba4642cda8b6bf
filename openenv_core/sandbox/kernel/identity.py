"""Who a process is: dropping to another uid, and giving every capability away for good."""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from . import libc

# Above what distributions, containers and service managers hand out, below the last 31-bit number.
_SESSION_UIDS = 0x7000_0000
# At the top of a range sit the overflow ids (65534, 65535): sessions stay below them.
_TOP_MARGIN = 64
_FIRST_SESSION_UID = 1000

_CAP_SETGID = 6
_CAP_SETUID = 7
_CAP_SETPCAP = 8
_CAP_LAST_POSSIBLE = 63
_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
# noroot, no_setuid_fixup, no_cap_ambient_raise, each with its lock; keep_caps only as a lock.
_SECUREBITS = 0b1110_1111


def _capget() -> tuple[int, int, int]:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    libc.call("capget", header, data, step="reading capabilities")
    low_e, low_p, low_i, high_e, high_p, high_i = struct.unpack("=6I", data.raw)
    return low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32


def effective_capabilities() -> int:
    """Return the effective capabilities of this thread, as a bit mask."""
    return _capget()[0]


def _has_capability(number: int) -> bool:
    return bool(effective_capabilities() >> number & 1)


def _bounding() -> Iterator[int]:
    for number in range(_CAP_LAST_POSSIBLE + 1):
        try:
            present = libc.prctl(_PR_CAPBSET_READ, number, step="reading the bounding set")
        except OSError as error:
            if error.errno == errno.EINVAL:  # beyond the last one that this kernel knows
                return
            raise
        if present:
            yield number


def drop_bounding() -> bool:
    """Empty the bounding set, where this process may; return whether it is empty now.

    An ordinary user cannot empty it; no_new_privs makes what is left harmless.
    """
    if _has_capability(_CAP_SETPCAP):
        capabilities = list(_bounding())
        for number in capabilities:
            libc.prctl(_PR_CAPBSET_DROP, number, step=f"dropping capability {number}")
        if not capabilities:
            return True
    return next(_bounding(), None) is None


def drop_to(uid: int, gid: int) -> None:
    """Become another user for good, with no other groups; needs CAP_SETUID and CAP_SETGID.

    The bounding set goes first: only the process that still has its capabilities may empty it.
    """
    drop_bounding()
    step = "setgroups"
    try:
        os.setgroups([])
        step = f"setresgid {gid}"
        os.setresgid(gid, gid, gid)
        step = f"setresuid {uid}"
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise OSError(error.errno, f"{step}: {error.strerror}") from None
    if os.getresuid() != (uid,) * 3 or os.getresgid() != (gid,) * 3 or os.getgroups() not in ([], [gid]):
        raise OSError(
            errno.EPERM, f"expected to be {uid}:{gid} alone, got {os.getresuid()}, {os.getresgid()}"
        )


def drop_capabilities() -> None:
    """Give up every capability: bounding, ambient, inheritable, permitted and effective.

    The bounding set is emptied where the process may; everything else is, and is read back.
    """
    if _has_capability(_CAP_SETPCAP):
        if not drop_bounding():
            raise OSError(errno.EPERM, "capabilities: the bounding set is not empty")
        libc.prctl(_PR_SET_SECUREBITS, _SECUREBITS, step="securebits")
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, step="clearing ambient capabilities")
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    libc.call("capset", header, bytes(24), step="dropping capabilities")
    remaining = _capget()
    if any(remaining):
        raise OSError(errno.EPERM, f"capabilities: expected none, got {remaining}")


@lru_cache(maxsize=2)
def mapped_ranges(path: str) -> tuple[tuple[int, int], ...]:
    """Return the ids that a map of this user namespace has, as (first, count); none where it cannot be read.

    Kept: ask before /proc goes away.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ()
    return tuple((int(first), int(count)) for first, _outside, count in (line.split() for line in lines))


def session_uid(slot: int) -> int | None:
    """Return the uid, and gid, of the session in a slot (0, 1, ...); None where uids cannot be changed."""
    may = _has_capability(_CAP_SETUID) and _has_capability(_CAP_SETGID) and _free_id(0) is not None
    return _free_id(slot) if may else None


class UserLeases:
    """The users that one sandbox has for its sessions.

    The kernel counts processes by user, and lets a user signal its own: two sandboxes must not share one.
    """

    def __init__(self) -> None:
        self._taken: dict[int, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def acquire(self) -> tuple[int, int | None]:
        """Take the first slot that nobody on this machine has.

        Returns:
            What `release` takes, and the slot's user; None where sessions have no users of their own.
        """
        slot = 0
        while True:
            while slot in self._taken:
                slot += 1
            uid = session_uid(slot)
            if uid is None:
                return slot, None
            lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                # An abstract name, which the kernel gives to one process at a time, and takes from one that dies.
                lease.bind(f"\0ropewalk-sandbox-user-{uid}")
            except OSError as error:
                lease.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                slot += 1
                continue
            self._taken[slot] = lease
            return slot, uid

    def release(self, slot: int) -> None:
        """Give a slot back. Idempotent."""
        if (lease := self._taken.pop(slot, None)) is not None:
            lease.close()


def _free_id(slot: int) -> int | None:
    uid, gid = (_in_ranges(slot, mapped_ranges(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
    # One number serves as both; where the maps differ so much that it cannot, there is none.
    return uid if uid == gid else None


def _in_ranges(slot: int, ranges: tuple[tuple[int, int], ...]) -> int | None:
    uid = _SESSION_UIDS + slot
    if any(first <= uid < first + count for first, count in ranges):
        return uid
    if not ranges:
        return None
    first, count = max(ranges)
    highest = first + count - 1 - _TOP_MARGIN - slot
    return highest if highest >= max(first, _FIRST_SESSION_UID) else None
