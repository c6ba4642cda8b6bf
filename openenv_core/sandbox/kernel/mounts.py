"""Mounting, with every failure saying which step it was."""

import ctypes
import os
import struct

from . import libc

READ_ONLY = 0x1
NO_SETUID = 0x2
NO_DEVICES = 0x4
NO_EXECUTION = 0x8

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None, step: str
) -> None:
    libc.call(
        "mount",
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        flags,
        None if data is None else data.encode(),
        step=step,
    )


def make_private(target: str = "/") -> None:
    """Keep every later mount, here and elsewhere, on its own side."""
    _mount(None, target, None, _MS_REC | _MS_PRIVATE, None, f"making {target} private")


def tmpfs(target: str, flags: int, **options: int | str) -> None:
    """Mount an empty tmpfs."""
    data = ",".join(f"{name}={value}" for name, value in options.items())
    _mount("tmpfs", target, "tmpfs", flags, data, f"mounting a tmpfs on {target} ({data})")


def bind(source: str, target: str, flags: int) -> None:
    """Show a file or a tree, with what is mounted beneath it, at another place.

    The flags are added to whatever each mount has: one that came from a more privileged namespace keeps the
    flags that are locked there, which a remount would have to repeat one by one.
    """
    _mount(source, target, None, _MS_BIND | _MS_REC, None, f"binding {source}")
    set_flags(target, flags, recursive=True)


def set_flags(target: str, flags: int, *, recursive: bool = False) -> None:
    """Add flags to a mount, and to those beneath it."""
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd. The values of these four flags are those
    # of mount(2).
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    libc.call(
        "mount_setattr",
        _AT_FDCWD,
        os.fsencode(target),
        _AT_RECURSIVE if recursive else 0,
        attributes,
        32,
        step=f"setting flags {flags:#x} on the mount of {target}",
    )


def pivot(new_root: str, put_old: str) -> None:
    """Make a mount the root of this namespace, with the old one beneath it."""
    step = f"pivoting into {new_root}"
    libc.call("pivot_root", os.fsencode(new_root), os.fsencode(put_old), step=step)
    os.chdir("/")


def detach(target: str) -> None:
    """Take a mount and all beneath it out of sight."""
    libc.call("umount2", os.fsencode(target), _MNT_DETACH, step=f"detaching {target}")
