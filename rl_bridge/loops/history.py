"""What became of each group of a run, as JSON lines: `groups.jsonl` in the run's folder."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_bridge.buffer.ledger import Fate, Ledger
from rl_bridge.metrics import rewind
from rl_bridge.types import PolicyVersion

HISTORY_FILE = "groups.jsonl"


class GroupHistory:
    """One line an iteration: the groups that it trained, and those that were given up since the one before.

    Args:
        folder: The run's.
        ledger: Whose groups they are.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._path = folder / HISTORY_FILE
        self._untold: list[Fate] = []
        ledger.on_fate = lambda fate: self._untold.append(fate)

    def state(self) -> list[Any]:
        """What a checkpoint holds of it, for `json`: fates that stand in no line yet.

        There are some where a checkpoint is written that no iteration has just ended with.
        """
        return [(fate.group, fate.version, fate.reason) for fate in self._untold]

    def write(self, iteration: PolicyVersion) -> None:
        """Append the line of the iteration just trained, and flush it."""
        fates, self._untold = self._untold, []
        row = {
            "iteration": iteration,
            "trained": [fate.group for fate in fates if fate.reason is None],
            "dropped": {str(fate.group): fate.reason for fate in fates if fate.reason is not None},
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, iteration: PolicyVersion, untold: Iterable[Any] = ()) -> None:
        """Forget what came after an iteration.

        Args:
            iteration: The last one whose line stays.
            untold: The checkpoint's `state`.
        """
        rewind(self._path, iteration)
        self._untold = [
            Fate(group=group, version=version, reason=reason) for group, version, reason in untold
        ]
