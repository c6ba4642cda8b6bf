"""How a client waits for a session of a full server."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from openenv_core.errors import CapacityError, ConnectionFailedError

T = TypeVar("T")

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Between two attempts at a server that has no queue, or refuses after its own wait; jitter takes off up to a half."""

SEVERAL_QUEUE_S: Final = 2.0
"""Seconds in the queue of one server of several; then the next is asked."""

_MIN_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 1.0

_NOTICE_AFTER_S: Final = 10.0

_logger = logging.getLogger("openenv_core.client")


class Backoff:
    """Pauses between attempts: each twice as long as the one before; jitter takes off up to a half.

    Args:
        min_s: Seconds of the first.
        max_s: The most seconds.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s, self._max_s = min_s, max_s
        self.reset()

    def reset(self) -> None:
        """Begin anew with the shortest."""
        self._next_s = self._min_s

    def next_s(self, requested_s: float = 0.0) -> float:
        """Return the length of the next, where the other side has asked for so many seconds."""
        pause_s = max(self._next_s, min(requested_s, self._max_s))
        self._next_s = min(2 * self._next_s, self._max_s)
        return pause_s * random.uniform(0.5, 1.0)


class SlotWait:
    """One wait for a session, within a deadline, over as many attempts as it takes.

    Args:
        timeout_s: Seconds until it is given up; 0: a full server is not waited for.
    """

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._attempt_at = self._loop.time()
        self._timeout_s = timeout_s
        self._backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        self._stopped = asyncio.Event()
        self._warned = False
        self._full = 0  # servers that have refused since the last pause
        self._place: int | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._began + self._timeout_s - self._loop.time()

    def attempt_s(self, servers: int) -> float:
        """Return the seconds that one attempt may wait in a queue; of several servers another may have room."""
        return max(0.0, self.left_s if servers == 1 else min(self.left_s, SEVERAL_QUEUE_S))

    async def pause(self, refusal: CapacityError, servers: int = 1) -> None:
        """Wait until the next attempt is due; of several servers the next is asked at once, until all have refused.

        Raises:
            CapacityError: The deadline would pass before, or the client is closed; it says how long was waited, and the
                last known place.
        """
        self._full += 1
        if self._full < servers and not self._stopped.is_set():
            return
        self._full = 0
        waited = self._loop.time() - self._attempt_at > MAX_BACKOFF_S / 2
        if waited:  # in the server's queue: the next attempt may begin at once
            self._backoff.reset()
        pause_s = self._backoff.next_s(0.0 if waited else refusal.retry_after_s or 0.0)
        self._place = refusal.place or self._place
        too_late = pause_s >= self.left_s
        if not too_late and not self._stopped.is_set():
            if not self._warned and self._loop.time() - self._began > _NOTICE_AFTER_S:
                self._warned = True
                left_s, why = self.left_s, refusal.message
                _logger.warning("waiting for a session, for %.0f s more at most: %s", left_s, why)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), pause_s)
        now = self._loop.time()
        if too_late or self._stopped.is_set():
            why, waited_s = refusal.message, round(now - self._began, 3)
            if self._timeout_s > 0:
                why += f"; this client has waited for {waited_s:g} s (queue_timeout_s)"
            known = {**refusal.data, "place": self._place, "waited_s": waited_s}
            raise CapacityError(why, refusal.code, known)
        self._attempt_at = now

    def stop(self) -> None:
        """End a pause; the client is being closed."""
        self._stopped.set()


async def one_of(
    urls: Sequence[str],
    attempt: Callable[[], Awaitable[T]],
    use_next: Callable[[], None],
    wait: SlotWait,
    retry_for_s: float = 0.0,
) -> T:
    """Return what an attempt does at the first server that lets it; ask all again as long as some are full.

    Args:
        urls: Of the servers; of a single one, or none.
        attempt: At the server in use.
        use_next: Makes the next one that in use.
        wait: Of the caller.
        retry_for_s: Seconds for which all are asked again where none answers.

    Raises:
        CapacityError: One was full, for longer than the wait, and no other answered.
        ConnectionFailedError: None answered.
    """
    clock = asyncio.get_running_loop().time
    latest, backoff = clock() + retry_for_s, Backoff(_MIN_RETRY_S, _MAX_RETRY_S)
    while True:
        full: CapacityError | None = None
        failed: ConnectionFailedError | None = None
        for _ in urls or ("",):
            try:
                return await attempt()
            except CapacityError as error:
                full = error
            except ConnectionFailedError as error:
                failed = error
            use_next()
        if full is not None:
            await wait.pause(full)
            latest = clock() + retry_for_s
            backoff.reset()
        elif failed is not None:
            if clock() + (pause_s := backoff.next_s()) > latest:
                raise failed
            await asyncio.sleep(pause_s)
