"""Which of the changes in a folder are changes of the source."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

SUFFIXES: Final = frozenset({".py", ".yaml", ".yml", ".json"})

IGNORED: Final = frozenset(
    {
        "__pycache__",
        "build",
        "dist",
        "htmlcov",
        "logs",
        "node_modules",
        "output",
        "outputs",
        "runs",
        "site-packages",
        "tests",
        "venv",
    }
)
"""Folders inside an environment's that nothing is served from; so are those whose names begin with a dot."""


class SourceFilter:
    """Tells a change of the source from all the others in its folders.

    Args:
        roots: The folders that are watched.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(roots)

    def __call__(self, change: object, path: str) -> bool:
        """Whether a change of this file is one of the source."""
        file = Path(path)
        return file.suffix in SUFFIXES and any(self._counts(file, root) for root in self._roots)

    def _counts(self, file: Path, root: Path) -> bool:
        if not file.is_relative_to(root):
            return False
        *folders, name = file.relative_to(root).parts
        return not name.startswith(".") and not any(
            folder in IGNORED or folder.startswith(".") or folder.endswith(".egg-info") for folder in folders
        )
