"""How many groups may be in flight: as many as keep the engines busy, with hardly a queue in front of them.

Too few leave engines idle while environments compute; of too many, the keys and values of their last turns are dropped
before the next ones. Which number is right depends on how long environments take, which changes in a run. So the limit
follows what engines report at regular intervals, as a window of TCP follows losses (RFC 5681), by factors both ways: it
grows while engines could compute more and it is what holds groups back, and shrinks while requests queue.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_bridge.generator.vllm_api import EngineTotals

GROWTH = 1.15
SHRINKAGE = 0.93
MAX_QUEUE_SHARE = 0.1
"""The most requests that may wait, as a share of those that are computed: answers that end soon make room for some."""
MAX_CACHE_USAGE = 0.9
"""The share of an engine's key-value cache in use above which no more groups are let in."""


class Concurrency:
    """The number of groups that may be in flight.

    Args:
        limit: The number at first.
        max_groups: The highest number.

    Attributes:
        limit: The number now, at least 1.
    """

    def __init__(self, limit: int, *, max_groups: int) -> None:
        self.limit = min(limit, max_groups)
        self._max_groups = max_groups
        self._preemptions: dict[int, int] = {}

    def adjust(self, engines: "Mapping[int, EngineTotals]", *, in_flight: int) -> None:
        """Adjust the limit to what each engine reports, by replica; nothing changes if none does.

        `in_flight` is the number of groups in flight: while it is below the limit, growing would change nothing.
        """
        if not engines:
            return
        preempted = any(
            totals.preemptions > self._preemptions.get(replica, totals.preemptions)
            for replica, totals in engines.items()
        )
        self._preemptions = {replica: totals.preemptions for replica, totals in engines.items()}
        running = sum(totals.running for totals in engines.values())
        waiting = sum(totals.waiting for totals in engines.values())
        usage = sum(totals.kv_cache_usage for totals in engines.values()) / len(engines)
        if preempted or waiting > max(1.0, MAX_QUEUE_SHARE * running):
            self.limit = max(1, int(SHRINKAGE * min(self.limit, in_flight)))
        elif not waiting and usage < MAX_CACHE_USAGE and in_flight >= self.limit:
            self.limit = min(self._max_groups, max(self.limit + 1, int(GROWTH * self.limit)))
