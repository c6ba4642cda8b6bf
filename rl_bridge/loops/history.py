"""What became of each group of a run, as JSON lines, and how long the parts of an iteration took."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_bridge.buffer.ledger import Fate, Ledger
from rl_bridge.metrics import rewind, span
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


class Iteration:
    """Times the parts of one passage through a loop; each is a span of the process too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, *, waits_for: str | None = None) -> Iterator[None]:
        """Time a block.

        Args:
            name: What happens there.
            waits_for: Whom the loop waits for there; None where it works itself.
        """
        began = time.perf_counter()
        try:
            with span(name, waits_for):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def figures(self) -> dict[str, float]:
        """Seconds of wall time, as `time/<part>_s`."""
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
