"""Our own code in a session's interpreter: what is sent, how its answer is read, which files are news."""

import base64
import json
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from openenv_core.sandbox import FileInfo, FileRefusedError, Limits

from .collector import ErrandUnansweredError

MOST_BYTES: Final = 8 << 20
"""The most that may come back: a piece of a file, or a list of many."""


class Errand:
    """One question to `inside.py`.

    The marker around the answer is random, so that nothing that was printed before is taken for it. Code that stays
    in the interpreter can see it and answer in our place; it would answer for its own files only.

    Args:
        verb: A function of `inside.py`.
        asked: Its argument, as JSON.

    Attributes:
        verb: As given.
        expression: A Python expression whose value is the answer, as a text.
    """

    def __init__(self, verb: str, **asked: Any) -> None:
        self.verb = verb
        self._marker = f"<{secrets.token_hex(16)}>"
        packed = base64.b64encode(json.dumps(asked).encode()).decode()
        # No name is left in the code's namespace.
        self.expression = (
            "(lambda names: (__import__('builtins').exec(names.pop('source'), names), "
            f"names['answer']({verb!r}, {packed!r}, {self._marker!r}))[1])"
            f"({{'__name__': 'files_of_a_session', 'source': {_source()!r}}})"
        )

    @property
    def statement(self) -> str:
        """A Python statement that prints the answer."""
        return f"print({self.expression})"

    def read(self, text: str) -> Mapping[str, Any]:
        """Find the answer in what came back.

        Args:
            text: What was printed, or the `repr` of the expression's value: markers and base64 are the same in both.

        Raises:
            ErrandUnansweredError: There is none.
        """
        # Code may have answered in our place, at any length: nothing is evaluated, and no more than this is read.
        pieces = text.split(self._marker, 3) if len(text) <= MOST_BYTES else []
        if len(pieces) == 3:
            try:
                said = json.loads(base64.b64decode(pieces[1], validate=True))
            except (ValueError, RecursionError):
                said = None
            if isinstance(said, dict):
                return said
        raise ErrandUnansweredError(
            "expected the interpreter to answer about its files, and it did not: the code in it may have replaced "
            "what that needs; restart it"
        )


@cache
def _source() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


MOST_CHARS: Final = 1024


def checked_path(path: str) -> str:
    """Return a path within the workspace in its plain form.

    Raises:
        FileRefusedError: It is absolute, leads upwards, or cannot be a path.
    """
    if not path or len(path) > MOST_CHARS or "\0" in path or "\\" in path or not path.isprintable():
        raise FileRefusedError(
            path[:100], f"a path has 1 to {MOST_CHARS} printable characters, and slashes forward"
        )
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not plain.parts:
        raise FileRefusedError(path, "a path is relative to the workspace and stays in it")
    return str(plain)


class Listing:
    """The files of one workspace, as its interpreter has told them.

    Args:
        limits: Bound how many are told, and how large those are whose content is digested.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows: dict[str, tuple[int, int, str]] = {}

    def arguments(self) -> dict[str, Any]:
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
            FileRefusedError: It is not of the form that ours has.
        """
        rows: dict[str, tuple[int, int, str]] = {}
        news: list[FileInfo] = []
        try:
            for path, size, time, digest in said["files"][: self._limits.files]:
                try:
                    place = checked_path(path)
                except FileRefusedError:  # nobody could ask for it
                    continue
                known = self._rows.get(place)
                row = (int(size), int(time), str(digest)[:64] or (known[2] if known else ""))
                rows[place] = row
                if known is None or (known[0], known[2]) != (row[0], row[2]):
                    news.append(_info(place, row))
        except (KeyError, TypeError, ValueError):
            raise FileRefusedError(".", "the interpreter described its files in words of its own") from None
        self._rows = rows
        return tuple(news)


def _info(path: str, row: tuple[int, int, str]) -> FileInfo:
    return FileInfo(path=path, size=row[0], sha256=row[2])
