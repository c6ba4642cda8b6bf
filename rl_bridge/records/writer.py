"""Keeps a few groups of every iteration, in a few bounded files."""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from rl_bridge.config.trainer import RecordsConfig
from rl_bridge.metrics import rewind
from rl_bridge.records.record import TokenText, group_records
from rl_bridge.types import Group, PolicyVersion, TrainSample

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


logger = logging.getLogger(__name__)


class RolloutRecords:
    """What a run leaves to be read of its rollouts: whole groups, drawn at random, within a bound.

    Args:
        folder: The run's.
        decode: Token ids of the policy to text, special tokens included.
        records: How much is kept.
    """

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str], records: RecordsConfig) -> None:
        self._text = TokenText(decode)
        self._groups = records.groups
        self._segments = Segments(folder, max_bytes=records.max_mb << 20)
        self._told = False

    def write(
        self, iteration: PolicyVersion, groups: Sequence[Group], samples: Sequence[TrainSample]
    ) -> None:
        """Keep some of the groups of an iteration. Which ones, its number decides.

        Args:
            iteration: Which one trained them; the first is 1.
            groups: All that it trained.
            samples: What was made of them, numbered by trajectory throughout.
        """
        rows: defaultdict[int, list[TrainSample]] = defaultdict(list)
        for sample in samples:
            rows[sample.trajectory].append(sample)
        drawn = random.Random(iteration).sample(range(len(groups)), min(self._groups, len(groups)))
        first = 0
        for place, group in enumerate(groups):
            if place in drawn:
                own = [rows[first + sibling] for sibling in range(len(group.trajectories))]
                self._keep(iteration, group, own)
            first += len(group.trajectories)

    def _keep(self, iteration: PolicyVersion, group: Group, rows: Sequence[Sequence[TrainSample]]) -> None:
        lines: list[bytes] = []
        size = 0
        for record in group_records(group, rows, iteration=iteration, text=self._text):
            lines.append(record.model_dump_json().encode() + b"\n")
            size += len(lines[-1])
            if size > self._segments.segment_bytes:  # the run waits, and no more of it is of use
                self._warn(group, trajectories=len(lines))
                return
        self._segments.append(lines)

    def _warn(self, group: Group, *, trajectories: int) -> None:
        if self._told:
            return
        self._told = True
        logger.warning(
            "%d of the %d rollouts of group %d take more than the %.1f MB that fit; such groups are not kept; "
            "raise records.max_mb",
            trajectories,
            len(group.trajectories),
            group.id,
            self._segments.segment_bytes / 2**20,
        )

    def rewind(self, iteration: PolicyVersion) -> None:
        """Forget what came after an iteration: it is trained again."""
        self._segments.rewind(iteration)
