"""What a pool holds: which of its members are ready, starting, used or going. Plain data behind one lock."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from openenv_core.errors import ConfigurationError, ImageNotFound, OptionUnavailable
from openenv_core.providers.pool.errors import PoolClosed, PoolError, PoolTimeout

LASTING: Final = (ConfigurationError, ImageNotFound, OptionUnavailable)
"""Failures that no wait mends."""


LOOK_S: Final = 0.5
"""How often whoever waits looks whether there is still somebody who makes members."""


class Member(Protocol):
    """What a pool keeps warm; a `Container` is one."""

    url: str

    def remove(self) -> None:
        """End it, and leave nothing of it. May be called again after it has failed."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool stands.

    Attributes:
        size: Members that it keeps, in all.
        ready: Those that can be handed out.
        starting: Those that are being started.
        used: Those that somebody has.
        leaving: Those that are being removed, beyond the size.
        started: Starts that succeeded so far.
        failed: Starts that failed so far.
        last_failure: What the last of them failed of, if no start has succeeded since.
    """

    size: int
    ready: int
    starting: int
    used: int
    leaving: int
    started: int
    failed: int
    last_failure: BaseException | None

    def __str__(self) -> str:
        text = (
            f"of {self.size} containers {self.ready} are ready, {self.starting} starting, {self.used} used; "
            f"{self.leaving} are being removed"
        )
        if self.last_failure is not None:
            said = str(self.last_failure).strip() or type(self.last_failure).__name__
            text += f"; {self.failed} starts failed, the last of: {said}"
        return text


@dataclass(slots=True)
class Stock:
    """The members of a pool. Everything below is under `changed`.

    Attributes:
        size: Members in all.
        changed: Notified whenever anything becomes ready, or nothing ever will.
        ready: Members that wait, the freshest last.
        used: Members that somebody has.
        leaving: Members to be removed, or under removal.
        starting: How many are being started.
        started: How many starts succeeded.
        failed: How many failed.
        failures: How many failed since one succeeded.
        last_failure: What the last failed of; None since one succeeded.
        closed: No more is handed out.
        dead: Why nobody replaces anything any more.
    """

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[Member] = field(default_factory=deque)
    used: dict[int, Member] = field(default_factory=dict)
    leaving: list[Member] = field(default_factory=list)
    starting: int = 0
    started: int = 0
    failed: int = 0
    failures: int = 0
    last_failure: BaseException | None = None
    closed: bool = False
    dead: BaseException | None = None

    @property
    def missing(self) -> int:
        """How many members are to be started."""
        return self.size - len(self.ready) - len(self.used) - self.starting

    def state(self) -> PoolState:
        """Return how it stands."""
        with self.changed:
            return PoolState(
                self.size,
                len(self.ready),
                self.starting,
                len(self.used),
                len(self.leaving),
                self.started,
                self.failed,
                self.last_failure,
            )

    def take(self, deadline: float, timeout_s: float, look: Callable[[], None]) -> Member:
        """Wait for a member, and return it as one that is used.

        Args:
            deadline: Until when, in monotonic time.
            timeout_s: The whole time, for the error.
            look: Called every LOOK_S seconds; notes when there is nobody to wait for.

        Raises:
            PoolTimeout: None became ready in time.
            PoolClosed: The pool was closed.
            PoolError: Whoever makes members has died.
        """
        with self.changed:
            while True:
                look()
                self._require_alive()
                if self.ready:
                    # The one that has waited longest: it is the surest to have settled.
                    member = self.ready.popleft()
                    self.used[id(member)] = member
                    return member
                self._require_hope("expected a container, got none")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._timed_out(
                        f"expected a container within {timeout_s:g} s, got none"
                    ) from self.last_failure
                self.changed.wait(min(left_s, LOOK_S))

    def wait_for(self, ready: int, deadline: float, timeout_s: float, look: Callable[[], None]) -> None:
        """Wait until so many members are ready, and take none. Arguments and errors are those of `take`."""
        with self.changed:
            while len(self.ready) < ready:
                look()
                self._require_alive()
                self._require_hope(f"expected {ready} containers to be ready, got {len(self.ready)}")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._timed_out(
                        f"expected {ready} containers to be ready within {timeout_s:g} s, got {len(self.ready)}"
                    ) from self.last_failure
                self.changed.wait(min(left_s, LOOK_S))

    def _require_hope(self, text: str) -> None:
        if isinstance(self.last_failure, LASTING) and not self.starting and not self.used:
            raise self._timed_out(f"{text}, and no wait will bring one") from self.last_failure

    def _require_alive(self) -> None:
        if self.closed:
            raise PoolClosed("expected an open pool, got one that was closed; make a new one")
        if self.dead is not None:
            raise PoolError(
                f"expected a pool that replaces what is used, but its thread died of "
                f"{type(self.dead).__name__}: {self.dead}; close it and make a new one"
            ) from self.dead

    def _timed_out(self, text: str) -> PoolTimeout:
        state = self.state()  # the condition's lock can be taken again by its holder
        hint = "give containers back, or raise size or timeout_s"
        return PoolTimeout(
            f"{text}: {state}; {'see the failure' if state.last_failure else hint}", state.last_failure
        )
