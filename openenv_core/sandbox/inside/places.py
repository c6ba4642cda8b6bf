"""Where an interpreter finds its streams and its files."""

import contextlib
import fcntl
import os
import tempfile
from typing import Final

CONTROL: Final = 3
"""The descriptor of the control socket; everything above it is closed."""

_FREE: Final = 16


def arrange(control: int, stdout: int, stderr: int) -> None:
    """Put descriptors where the interpreter expects them."""
    # First out of the way of each other, then to their places.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE) for descriptor in (stdout, stderr, control)]
    for descriptor in {stdout, stderr, control} - {1, 2, CONTROL}:
        os.close(descriptor)
    for descriptor, place in zip(moved, (1, 2, CONTROL), strict=True):
        os.dup2(descriptor, place, inheritable=place != CONTROL)
        os.close(descriptor)


def furnish(workdir: str) -> None:
    """Make a folder the place where code reads and writes."""
    os.chdir(workdir)
    temporary = os.path.join(workdir, ".tmp")
    with contextlib.suppress(FileExistsError):
        os.mkdir(temporary, 0o700)
    tempfile.tempdir = None
    # One by one: update() goes through much more of Python, and every page that it touches is copied for the session.
    for name, value in (
        ("HOME", workdir),
        ("TMPDIR", temporary),
        ("MPLCONFIGDIR", temporary),
        ("PWD", workdir),
    ):
        os.environ[name] = value
