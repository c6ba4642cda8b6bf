"""Tasks from JSON Lines: a folder with a file for each split, or one file. Files may have millions of lines.

What is kept of a file is where its lines begin. A task is read when it is asked for, and mistakes are told with the
file and the line.
"""

import os
import threading
from array import array
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
    """A line that holds no task; the message names the file and the line."""


class JsonlTasks(IndexedTasks):
    """The tasks of a folder or a file.

    The methods of `openenv_core.tasks.TaskProvider` show the public half of tasks; `task` returns the whole. One
    object may be shared by all sessions of a server, and by threads.

    Args:
        path: a folder with files `NAME.jsonl`, each a split, or one such file, which is the one split.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
        if not files or not all(file.is_file() for file in files):
            raise ConfigurationError(f"expected a folder with *.jsonl files, or one such file, got {folder}")
        self._files = {file.stem: _LineIndex(file) for file in files}

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits' names: train, validation and test first, where they are there."""
        rank = {name: at for at, name in enumerate(SPLITS)}
        return tuple(sorted(self._files, key=lambda name: (rank.get(name, len(rank)), name)))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files with hidden tests, which must not be readable in sandboxes."""
        return tuple(lines.path.resolve() for lines in self._files.values())

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has. KeyError: there is no such split."""
        return len(self._find_lines(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the public half of a task. IndexError: the split has no such index."""
        return public_view(self.task(split, index))

    def task(self, split: str, index: int) -> Task:
        """Return a whole task, with its hidden half, for a grader.

        Raises:
            KeyError: There is no such split.
            IndexError: The split has no such index.
            InvalidTaskError: The line holds no task.
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
        """Return the index of the task of that name, by reading the lines of the split one after the other.

        Raises:
            KeyError: There is none.
        """
        for index, line in enumerate(self._find_lines(split)):
            try:
                row = from_json(line)
            except ValueError:
                continue  # told when the task itself is asked for
            if isinstance(row, dict) and row.get("id") == task_id:
                return index
        raise KeyError(f"expected the id of a task of the split {split!r}, got {task_id!r}")

    def _find_lines(self, split: str) -> "_LineIndex":
        try:
            return self._files[split]
        except (KeyError, TypeError):
            raise KeyError(f"expected a split ({', '.join(self.splits)}), got {split!r}") from None


class _LineIndex:
    """A file's lines by index, blank ones left out."""

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
                        if not line.isspace():
                            offsets.append(offset)
                            numbers.append(number)
                        offset += len(line)
                self._stamp = (stat.st_size, stat.st_mtime_ns)
                self._offsets, self._numbers = offsets, numbers
            return self._offsets
