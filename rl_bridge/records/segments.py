"""The files that records are kept in: a few, each bounded; the first and the newest ones stay.

The first stays, because one wants to see what a run began as; between it and the newest ones the oldest goes.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from rl_bridge.metrics import rewind

FOLDER = "rollouts"
"""In a run's folder."""
SEGMENTS = 8
"""Files at most."""


def segment_files(run: Path) -> list[Path]:
    """The files in a run's folder, oldest first."""
    numbered = (path for path in (run / FOLDER).glob("*.jsonl") if path.stem.isdecimal())
    return sorted(numbered, key=lambda path: int(path.stem))


class Segments:
    """Appends lines, and keeps within a bound.

    Args:
        run: The run's folder. A file that is there is gone on with.
        max_bytes: Of all files together.
    """

    def __init__(self, run: Path, *, max_bytes: int) -> None:
        self._run = run
        self.segment_bytes = max_bytes // SEGMENTS
        """What one file holds at most."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines, each with its end, that belong together and are within `segment_bytes`."""
        size = sum(map(len, lines))
        files = segment_files(self._run)
        if not files or files[-1].stat().st_size + size > self.segment_bytes:
            (self._run / FOLDER).mkdir(exist_ok=True)
            number = int(files[-1].stem) + 1 if files else 1
            files.append(self._run / FOLDER / f"{number:06d}.jsonl")
        with files[-1].open("ab") as file:
            file.writelines(lines)
        for old in files[1 : 1 + max(0, len(files) - SEGMENTS)]:
            old.unlink(missing_ok=True)

    def rewind(self, iteration: int) -> None:
        """Take out what came after an iteration, and a last line that was cut off."""
        for path in reversed(segment_files(self._run)):
            if rewind(path, iteration):
                return
            path.unlink()


def read_lines(run: Path) -> Iterator[bytes]:
    """The lines of all records, oldest first, without the one that is just being written.

    A file that is deleted meanwhile has no lines left.
    """
    for path in segment_files(run):
        try:
            with path.open("rb") as file:
                # Not on behind a line without an end: its rest, once it is there, would pass for a line.
                yield from takewhile(lambda line: line.endswith(b"\n"), file)
        except FileNotFoundError:
            continue
