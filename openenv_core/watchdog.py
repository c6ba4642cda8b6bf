"""A deadline for one request after another that costs nothing while replies come in time."""

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls back when a request has been under way for too long.

    A timer for each request would be set and cancelled at every step. This one is left running, and
    looks at the deadline of the request of the moment when it goes off.

    Args:
        timeout_s: Seconds that a request may take; None lets it take for ever.
        on_expiry: Called once for the request that took longer.
    """

    __slots__ = ("_deadline", "_loop", "_on_expiry", "_timeout_s", "_timer", "expired")

    def __init__(self, timeout_s: float | None, on_expiry: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False

    def start(self) -> None:
        """Begin the time of a request."""
        if self._timeout_s is None:
            return
        self._deadline = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check)

    def expect(self, timeout_s: float | None, on_timeout: Callable[[], None]) -> None:
        """Begin the time of something that may take longer than the shortest request, and ends in its own way.

        Args:
            timeout_s: Seconds, no fewer than the watchdog's own; None lets it take for ever.
            on_timeout: Called once if it takes longer.
        """
        if timeout_s is None:
            return
        self._on_expiry = on_timeout
        now = self._loop.time()
        self._deadline = now + timeout_s
        if self._timer is None:
            # Not at the deadline itself: what comes next may have to be over before.
            self._timer = self._loop.call_at(now + min(timeout_s, self._timeout_s or timeout_s), self._check)

    def stop(self) -> None:
        """End it: the reply has come."""
        self._deadline = None

    def close(self) -> None:
        """Take the timer away for good."""
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        deadline = self._deadline
        if deadline is None:
            return
        now = self._loop.time()
        if now < deadline:
            self._timer = self._loop.call_at(min(deadline, now + (self._timeout_s or deadline)), self._check)
            return
        self._deadline = None
        self.expired = True
        self._on_expiry()
