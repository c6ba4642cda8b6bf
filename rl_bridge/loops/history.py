"""What became of each group of a run, as JSON lines: `groups.jsonl` in the run's folder."""

import json
from pathlib import Path

from rl_bridge.buffer.ledger import Ledger
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
        self._ledger = ledger
        self._told = self._fates

    @property
    def _fates(self) -> int:
        return self._ledger.trained + self._ledger.dropped.total()

    def write(self, iteration: PolicyVersion) -> None:
        """Append the line of the iteration just trained, and flush it."""
        count, self._told = self._fates - self._told, self._fates
        fates = list(self._ledger.history)[-count:] if count else []
        row = {
            "iteration": iteration,
            "trained": [fate.group for fate in fates if fate.reason is None],
            "dropped": {str(fate.group): fate.reason for fate in fates if fate.reason is not None},
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, iteration: PolicyVersion) -> None:
        """Forget what came after an iteration; the ledger has gone back already."""
        rewind(self._path, iteration)
        self._told = self._fates
