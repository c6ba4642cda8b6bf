"""Keeps a few groups of every iteration."""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_bridge.config.records import RecordsConfig
from rl_bridge.records.making import group_records
from rl_bridge.records.segments import Segments
from rl_bridge.records.token_text import TokenText
from rl_bridge.types import Group, PolicyVersion, TrainSample

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
