"""Paths of files of a workspace, as they come from outside."""

from pathlib import PurePosixPath
from typing import Final

from openenv_core.sandbox import FileRefused

MOST_CHARS: Final = 1024


def checked_path(path: str) -> str:
    """Return a path within the workspace in its plain form.

    Raises:
        FileRefused: It is absolute, leads upwards, or cannot be a path.
    """
    if not path or len(path) > MOST_CHARS or "\0" in path or "\\" in path or not path.isprintable():
        raise FileRefused(
            path[:100], f"a path has 1 to {MOST_CHARS} printable characters, and slashes forward"
        )
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not plain.parts:
        raise FileRefused(path, "a path is relative to the workspace and stays in it")
    return str(plain)
