"""Process credentials: changing to another user, and dropping all capabilities permanently."""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from . import libc

# Above the ids that distributions, containers and service managers assign, and below 2**31.
_SESSION_UIDS = 0x7000_0000
# The overflow ids (65534, 65535) are at the top of a range: sessions stay below them.
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
# noroot, no_setuid_fixup and no_cap_ambient_raise, each set and locked; keep_caps locked but not set.
_SECUREBITS = 0b1110_1111


def _capget() -> tuple[int, int, int]:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    libc.call("capget", header, data, step="reading capabilities")
    low_e, low_p, low_i, high_e, high_p, high_i = struct.unpack("=6I", data.raw)
    return low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32


def effective_capabilities() -> int:
    """Return this thread's effective capabilities as a bit mask."""
    return _capget()[0]


def _has_capability(number: int) -> bool:
    return bool(effective_capabilities() >> number & 1)


def _bounding() -> Iterator[int]:
    for number in range(_CAP_LAST_POSSIBLE + 1):
        try:
            present = libc.prctl(_PR_CAPBSET_READ, number, step="reading the bounding set")
        except OSError as error:
            if error.errno == errno.EINVAL:  # beyond the kernel's last capability
                return
            raise
        if present:
            yield number


def drop_bounding() -> bool:
    """Empty the bounding set if this process may; return whether it is empty now.

    An ordinary user may not; no_new_privs makes the remaining set harmless.
    """
    if _has_capability(_CAP_SETPCAP):
        for number in _bounding():
            libc.prctl(_PR_CAPBSET_DROP, number, step=f"dropping capability {number}")
    return next(_bounding(), None) is None


def drop_to(uid: int, gid: int) -> None:
    """Become another user permanently, without supplementary groups; needs CAP_SETUID and CAP_SETGID.

    The bounding set is emptied first, while the process still has the capabilities for that.
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
    """Drop every capability: bounding, ambient, inheritable, permitted and effective.

    The bounding set is emptied if the process may do so; all other sets are, and the result is verified.
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
    """Return the id ranges that a map of this user namespace contains, as (first, count); empty if it is unreadable.

    Cached: call it before /proc becomes invisible.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ()
    return tuple((int(first), int(count)) for first, _outside, count in (line.split() for line in lines))


def session_uid(slot: int) -> int | None:
    """Return the uid, which is also the gid, of the session in a slot (0, 1, ...); None if uids cannot be changed."""
    may = _has_capability(_CAP_SETUID) and _has_capability(_CAP_SETGID) and _free_id(0) is not None
    return _free_id(slot) if may else None


class UserLeases:
    """Leases of users for a sandbox's sessions.

    The kernel counts processes per user, and lets a user signal its own processes, so two sandboxes must not share one.
    """

    def __init__(self) -> None:
        self._taken: dict[int, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def acquire(self) -> tuple[int, int | None]:
        """Lease the first slot that is free on this machine.

        Returns:
            The slot, for `release`, and its user; None if sessions cannot have their own users.
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
                # An abstract name: the kernel gives it to one process at a time, and frees it when that process dies.
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
        """Release a slot. Idempotent."""
        if (lease := self._taken.pop(slot, None)) is not None:
            lease.close()


def _free_id(slot: int) -> int | None:
    uid, gid = (_in_ranges(slot, mapped_ranges(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
    # One number serves as uid and gid; if the maps differ too much for that, there is none.
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
