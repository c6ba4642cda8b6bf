"""A timeout for consecutive requests that costs almost nothing while replies come in time."""

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls back when a request takes too long.

    A timer per request would be set and cancelled at every step. This one is left running and checks the deadline of
    the current request when it fires.

    Args:
        timeout_s: Seconds that a request may take; None for no limit.
        on_expiry: Called once if a request takes longer.
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
        """Start timing a request."""
        if self._timeout_s is None:
            return
        self._deadline = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check)

    def stop(self) -> None:
        """Stop timing: the reply has arrived."""
        self._deadline = None

    def close(self) -> None:
        """Cancel the timer for good."""
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        deadline = self._deadline
        if deadline is None:
            return
        if self._loop.time() < deadline:
            self._timer = self._loop.call_at(deadline, self._check)
            return
        self._deadline = None
        self.expired = True
        self._on_expiry()
