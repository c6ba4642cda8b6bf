"""Ordinary code that meets a wall which was put up for others.

Where interpreters share their user with the server, no file's mode and times can be set: any of the user's own files
on the machine would be within reach. Copying a file sets both, and hardly anybody who copies cares.
"""

import shutil
from contextlib import suppress
from typing import Any, Final

COPIED: Final = ("copymode", "copystat")


def ease_copying() -> None:
    """Have `shutil` copy without what may not be set, rather than fail once the content is there."""
    for name in COPIED:
        _ease(name, getattr(shutil, name))


def _ease(name: str, copy: Any) -> None:
    def tolerant(*args: Any, **kwargs: Any) -> None:
        with suppress(PermissionError):
            copy(*args, **kwargs)

    tolerant.__name__, tolerant.__doc__ = name, copy.__doc__
    setattr(shutil, name, tolerant)
