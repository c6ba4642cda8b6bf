"""One server as a worker knows it: the sessions held there, and whether to ask for another."""

import random
from typing import Any, TypeAlias

from openenv_core import EnvClient

Client: TypeAlias = EnvClient[Any, Any, Any]

BACKOFF_S = 0.1
"""After the first failure; doubles with each further one."""
MAX_BACKOFF_S = 5.0
FULL_S = 1.0
"""Between two attempts at a server that has no room, where it does not say how long."""


class Address:
    """What is known of one server. All times are those of the event loop's clock, in seconds.

    A server that cannot be reached is asked again after a pause that grows, by one session alone. A server without
    room is asked for a few sessions more after a while.

    Args:
        url: Where it is.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[tuple[float, Client]] = []
        """Open sessions that nobody uses, and since when; the one that was used last is the last."""
        self.held = 0
        """Sessions that are in use, or being opened or closed."""
        self.opening = 0
        """Those of them that are being opened."""
        self.gone = False
        """Whether it was taken off the list: it gets no further session, and those that end are not kept."""
        self._failures = 0
        self._retry_at = 0.0
        self._room: int | None = None
        self._ask_at = 0.0

    def usable(self, now: float) -> bool:
        """Whether a session can be had here, or may be worth asking for."""
        if self._failures and (now < self._retry_at or self.opening):
            return False
        if self.idle or self._room is None or self.held < self._room:
            return True
        return now >= self._ask_at

    def usable_at(self) -> float | None:
        """When to look again at a server that is not usable; None where something else has to happen first."""
        if self._failures:
            return None if self.opening else self._retry_at
        return self._ask_at

    @property
    def crowded(self) -> bool:
        """Whether it serves, but had no room for a session that was asked for."""
        return self._room is not None and not self._failures

    def asked(self, now: float) -> None:
        """A session is being opened."""
        self.held += 1
        self.opening += 1
        if self._room is not None and self.held > self._room:
            self._room, self._ask_at = self.held + self.held // 8, now + FULL_S

    def opened(self) -> None:
        """A session could be opened."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """It could not be reached, or a session broke."""
        if now < self._retry_at:
            return  # the sessions of a server that dies fail together: one failure, not one each
        pause = min(BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
        self._failures += 1
        self._retry_at = now + pause * random.uniform(0.5, 1.0)

    def refused(self, now: float, retry_after_s: float | None) -> None:
        """It has no room for a session that was asked for, which counts as held."""
        self._room = self.held - 1 + len(self.idle)
        self._ask_at = now + (FULL_S if retry_after_s is None else min(retry_after_s, MAX_BACKOFF_S))

    def renewed(self) -> None:
        """Somebody says that it serves: what was known of it is out of date."""
        self._failures, self._retry_at, self._room = 0, 0.0, None
