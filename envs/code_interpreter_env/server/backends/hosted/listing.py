"""What files a workspace has, and which of them are news."""

from collections.abc import Mapping
from typing import Any

from openenv_core.sandbox import FileInfo, FileRefused, Limits

from .paths import checked_path


class Listing:
    """The files of one workspace, as its interpreter has told them.

    Args:
        limits: Bound how many are told, and how large those are whose content is digested.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows: dict[str, tuple[int, int, str]] = {}

    def asked(self) -> dict[str, Any]:
        """Return the arguments of the question."""
        return {
            "known": {path: [size, time] for path, (size, time, _) in self._rows.items()},
            "most_files": self._limits.files,
            "most": self._limits.file_bytes,
        }

    def files(self) -> list[FileInfo]:
        """Return all files."""
        return [_info(path, row) for path, row in sorted(self._rows.items())]

    def read(self, said: Mapping[str, Any]) -> tuple[FileInfo, ...]:
        """Take an answer in, and return what is new or different since the one before.

        Raises:
            FileRefused: It is not of the form that ours has.
        """
        rows: dict[str, tuple[int, int, str]] = {}
        news: list[FileInfo] = []
        try:
            for path, size, time, digest in said["files"][: self._limits.files]:
                try:
                    place = checked_path(path)
                except FileRefused:  # nobody could ask for it
                    continue
                known = self._rows.get(place)
                row = (int(size), int(time), str(digest)[:64] or (known[2] if known else ""))
                rows[place] = row
                if known is None or (known[0], known[2]) != (row[0], row[2]):
                    news.append(_info(place, row))
        except (KeyError, TypeError, ValueError):
            raise FileRefused(".", "the interpreter described its files in words of its own") from None
        self._rows = rows
        return tuple(news)


def _info(path: str, row: tuple[int, int, str]) -> FileInfo:
    return FileInfo(path=path, size=row[0], sha256=row[2])
