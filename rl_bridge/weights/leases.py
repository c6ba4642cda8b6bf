"""Leases that end by themselves, for readers of other machines, whose death no kernel of ours tells."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rl_bridge.weights.snapshot import Key, Publication


@dataclass(slots=True)
class Leases:
    """Who reads which publishing of which key, and until when at most.

    Args:
        clock: Seconds; only differences count.
    """

    clock: Callable[[], float] = time.monotonic
    _until: dict[tuple[Key, Publication], dict[str, float]] = field(default_factory=dict)

    def grant(self, key: Key, publication: Publication, holder: str, seconds: float) -> None:
        """Let a holder read for so long. A holder that is there already begins anew."""
        self._until.setdefault((key, publication), {})[holder] = self.clock() + seconds

    def end(self, key: Key, publication: Publication, holder: str) -> None:
        """The holder has read, or given up. Nothing happens where its time was over already."""
        holders = self._until.get((key, publication), {})
        holders.pop(holder, None)
        if not holders:
            self._until.pop((key, publication), None)

    def holders(self, key: Key, publication: Publication) -> list[str]:
        """Who reads now; those whose time is over are forgotten."""
        for holder, until in list(self._until.get((key, publication), {}).items()):
            if until <= self.clock():
                self.end(key, publication, holder)
        return list(self._until.get((key, publication), {}))
