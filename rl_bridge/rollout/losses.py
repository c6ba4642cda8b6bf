"""One line in the log for what is lost together: a worker that dies takes many groups with it."""

import asyncio
import logging

logger = logging.getLogger(__name__)

TOGETHER_S = 0.5
"""Losses within so many seconds are one, as far as a reader is concerned."""
GROUPS_NAMED = 8


class LossReport:
    """Gathers the groups that were lost, and says so a moment later."""

    def __init__(self) -> None:
        self._lost: dict[str, list[int]] = {}
        self._soon: asyncio.TimerHandle | None = None

    def add(self, group: int, reason: str) -> None:
        """The work on a group was lost."""
        self._lost.setdefault(reason, []).append(group)
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(TOGETHER_S, self.tell)

    def tell(self) -> None:
        """Say what is not said yet: a line a reason."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        lost, self._lost = self._lost, {}
        for reason, unsorted in lost.items():
            groups = sorted(unsorted)
            named = ", ".join(map(str, groups[:GROUPS_NAMED])) + (", …" if len(groups) > GROUPS_NAMED else "")
            logger.warning("work was lost, on %d group(s) (%s): %s", len(groups), named, reason)
