"""Tasks from JSON Lines: a folder with one file per split, or a single file. Files may have millions of lines.

Only the offsets of lines are kept in memory. Tasks are parsed on demand, and errors name the file and the line.
"""

import os
import threading
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from openenv_core.errors import ConfigurationError, describe_faults
from openenv_core.tasks import SPLITS, IndexedTasks

from .task import Task, parse_task, public_view

MAX_LINE_BYTES: Final = 16 << 20


class InvalidTaskError(ConfigurationError):
    """A line is not a valid task; the message names the file and the line."""


class JsonlTasks(IndexedTasks):
    """The tasks of a folder or a file.

    The methods of `openenv_core.tasks.TaskProvider` return the public part of tasks; `task` returns all of it.
    Thread-safe; all sessions of a server can share one instance.

    Args:
        path: a folder with a file `NAME.jsonl` per split, or one such file, which is then the only split.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
        if not files or not all(file.is_file() for file in files):
            raise ConfigurationError(f"expected a folder with *.jsonl files, or one such file, got {folder}")
        self._files = {file.stem: _LineIndex(file) for file in files}

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits; train, validation and test come first if present."""
        rank = {name: at for at, name in enumerate(SPLITS)}
        return tuple(sorted(self._files, key=lambda name: (rank.get(name, len(rank)), name)))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The task files. They hold hidden tests, so sandboxed code must not be able to read them."""
        return tuple(lines.path.resolve() for lines in self._files.values())

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split.

        Raises:
            KeyError: There is no such split.
        """
        return len(self._find_lines(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public part of a task; raises as `task` does."""
        return public_view(self.task(split, index))

    def task(self, split: str, index: int) -> Task:
        """Return a task with its hidden part, for a grader.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
            InvalidTaskError: The line is not a valid task.
        """
        lines = self._find_lines(split)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(lines):
            raise IndexError(f"expected an index below {len(lines)} of the split {split!r}, got {index!r}")
        number, line = lines.read(index)
        try:
            return parse_task(line)
        except ValidationError as error:
            raise InvalidTaskError(f"{lines.path}:{number}: {describe_faults(error, 'task')}") from None

    def find(self, split: str, task_id: str) -> int:
        """Return the index of a task by its id, with a linear scan of the split.

        Raises:
            KeyError: The split, or a task with this id, does not exist.
        """
        for index, line in enumerate(self._find_lines(split)):
            try:
                row = from_json(line)
            except ValueError:
                continue  # reported when that task itself is requested
            if isinstance(row, dict) and row.get("id") == task_id:
                return index
        raise KeyError(f"expected the id of a task of the split {split!r}, got {task_id!r}")

    def _find_lines(self, split: str) -> "_LineIndex":
        try:
            return self._files[split]
        except (KeyError, TypeError):
            raise KeyError(f"expected a split ({', '.join(self.splits)}), got {split!r}") from None


class _LineIndex:
    """An index of the non-blank lines of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._offsets: array[int] | None = None
        self._numbers: array[int] = array("Q")
        self._stamp: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self._build_index())

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self._build_index()[0] if len(self) else 0)
            yield from (line for line in file if line.strip())

    def read(self, index: int) -> tuple[int, bytes]:
        """Return a line's number and content."""
        offsets = self._build_index()
        with self.path.open("rb") as file:
            file.seek(offsets[index])
            line = file.readline(MAX_LINE_BYTES)
            stat = os.fstat(file.fileno())
        if (stat.st_size, stat.st_mtime_ns) != self._stamp:
            raise InvalidTaskError(f"{self.path}: the file was changed while it is in use; start anew")
        return self._numbers[index], line

    def _build_index(self) -> "array[int]":
        with self._lock:
            if self._offsets is None:
                offsets, numbers, offset = array("Q"), array("Q"), 0
                with self.path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    for number, line in enumerate(file, 1):
                        text = line.removeprefix(BOM_UTF8) if number == 1 else line
                        if not text.isspace():
                            offsets.append(offset + len(line) - len(text))
                            numbers.append(number)
                        offset += len(line)
                self._stamp = (stat.st_size, stat.st_mtime_ns)
                self._offsets, self._numbers = offsets, numbers
            return self._offsets
