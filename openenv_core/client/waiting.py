"""Waiting for a session of a full server: back-off and deadline."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from openenv_core.backoff import Backoff
from openenv_core.errors import CapacityError

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Limits of the pause between attempts at a server that has no queue, or refuses after queueing; before jitter."""

SEVERAL_QUEUE_S: Final = 2.0
"""Seconds in the queue of one server of several before the next is tried."""

_NOTICE_AFTER_S: Final = 10.0

_logger = logging.getLogger("openenv_core.client")


class SlotWait:
    """A wait for a session, over any number of attempts until a deadline.

    Args:
        timeout_s: Seconds until the deadline; 0 does not wait for a full server.
    """

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._attempt_started_at = self._loop.time()
        self._timeout_s = timeout_s
        self._backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        self._stopped = asyncio.Event()
        self._warned = False
        self._refusals = 0  # servers that refused since the last pause
        self._place: int | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self._started_at + self._timeout_s - self._loop.time()

    def attempt_s(self, servers: int) -> float:
        """Return the seconds that an attempt may wait in a server's queue; less if there are other servers to try."""
        return max(0.0, self.remaining_s if servers == 1 else min(self.remaining_s, SEVERAL_QUEUE_S))

    async def pause(self, refusal: CapacityError, servers: int = 1) -> None:
        """Wait until the next attempt is due; with several servers, only after all have refused.

        Raises:
            CapacityError: The deadline would pass first, or the client is closed; with the time waited and the last
                known place in the queue.
        """
        self._refusals += 1
        if self._refusals < servers and not self._stopped.is_set():
            return
        self._refusals = 0
        was_queued = self._loop.time() - self._attempt_started_at > MAX_BACKOFF_S / 2
        if was_queued:  # in the server's queue, so the next attempt need not back off
            self._backoff.reset()
        pause_s = self._backoff.next_s(0.0 if was_queued else refusal.retry_after_s or 0.0)
        self._place = refusal.place or self._place
        exceeds_deadline = pause_s >= self.remaining_s
        if not exceeds_deadline and not self._stopped.is_set():
            if self._loop.time() - self._started_at > _NOTICE_AFTER_S:
                self._warn(refusal.message)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), pause_s)
        now = self._loop.time()
        if exceeds_deadline or self._stopped.is_set():
            message, waited_s = refusal.message, round(now - self._started_at, 3)
            if self._timeout_s > 0:
                message += f"; this client has waited for {waited_s:g} s (queue_timeout_s)"
            data = {**refusal.data, "place": self._place, "waited_s": waited_s}
            raise CapacityError(message, refusal.code, data)
        self._attempt_started_at = now

    def start_notice(self) -> asyncio.TimerHandle:
        """Start the timer of the warning that the client waits in a server's queue; cancelled at the end of that."""
        return self._loop.call_later(_NOTICE_AFTER_S, self._warn, "the server is full")

    def _warn(self, reason: str) -> None:
        """Log, once, that the client is waiting."""
        if not self._warned:
            self._warned, remaining_s = True, self.remaining_s
            _logger.warning("waiting for a session, for %.0f s more at most: %s", remaining_s, reason)

    def stop(self) -> None:
        """End the pause, because the client is being closed."""
        self._stopped.set()
