"""Slots: the caps on sessions, overall and per owner; and the errors that refuse a session or a call."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

from openenv_core.protocol.errors import CAPACITY_REACHED, EXECUTION_ERROR, SESSION_ERROR, RefusalError, short


class SessionSlots:
    """Counts the sessions of one process against a cap, and its waiting requests by arrival (`time.monotonic_ns`).

    `servers.fleet.slots` does so for several processes together.

    Args:
        total: Greatest number of sessions of the server.
        per_owner: Greatest number of sessions of one owner; None for no other limit than the total.
        local: Greatest number of sessions of this process; None for no other limit than the total.

    Attributes:
        total: Greatest number of slots in use at once.
        cap: Greatest number in use in this process.
    """

    def __init__(self, total: int, per_owner: int | None = None, local: int | None = None) -> None:
        self.total = total
        self.cap = total if local is None else min(total, local)
        self._per_owner = per_owner
        self._in_use: Counter[str] = Counter()
        self._ending = 0
        self._arrivals: list[int] = []

    @property
    def active(self) -> int:
        """Slots in use."""
        return self._in_use.total()

    @property
    def by_worker(self) -> list[int]:
        """Slots in use in each process."""
        return [self.active]

    @property
    def local_active(self) -> int:
        """Slots in use in this process."""
        return self.active

    def count_owner(self, owner: str) -> int:
        """Return the slots that an owner has."""
        return self._in_use[owner]

    @property
    def max_per_owner(self) -> int:
        """Greatest number of slots that one owner may have at once."""
        return self.cap if self._per_owner is None else min(self.cap, self._per_owner)

    def find_shortage(self, owner: str, count: int) -> "FullError | None":
        """Return why an owner cannot take this many slots now; None if it can."""
        if self._per_owner is not None and (used := self.count_owner(owner)) + count > self._per_owner:
            return FullError("session of this token", used, self._per_owner, count, is_own_limit=True)
        if self.cap < self.total and (used := self.local_active) + count > self.cap:
            return FullError("session in this worker process", used, self.cap, count, is_own_limit=True)
        if (used := self.active) + count > self.total:
            return FullError("session", used, self.total, count)
        return None

    def acquire(self, owner: str, count: int = 1, arrival: int | None = None) -> None:
        """Take slots for an owner, all of them or none.

        Args:
            owner: The owner.
            count: Number of slots.
            arrival: When the request arrived, in ns; earlier requests of other processes that a free slot could serve
                go first.

        Raises:
            FullError: There are too few.
        """
        if (shortage := self.find_shortage(owner, count)) is not None:
            raise shortage
        self._in_use[owner] += count

    def release(self, owner: str) -> None:
        """Return one slot of an owner."""
        self._in_use[owner] -= 1
        if not self._in_use[owner]:
            del self._in_use[owner]

    @property
    def ending(self) -> int:
        """Sessions that are ending and still hold their slot."""
        return self._ending

    def add_ending(self, change: int) -> None:
        """Change the number of ending sessions, by 1 or -1."""
        self._ending += change

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._arrivals)

    def listen(self, on_release: Callable[[], None]) -> None:
        """Call `on_release` when another process may have returned slots while requests wait here."""

    def enqueue(self, arrival: int) -> None:
        """Add a waiting request that arrived after all others of this process."""
        self._arrivals.append(arrival)

    def dequeue(self, arrival: int) -> None:
        """Remove a waiting request."""
        del self._arrivals[bisect_left(self._arrivals, arrival)]

    def place_of(self, arrival: int) -> int:
        """Return a request's place in the order of arrival, from 1."""
        return bisect_left(self._arrivals, arrival) + 1

    def set_head(self, arrival: int | None) -> None:
        """Set which request of this process is served next; None if a returned slot would serve none of them."""


class FullError(RefusalError):
    """There are fewer free slots than requested.

    Args:
        resource: What there is too little of.
        in_use: Number in use.
        cap: Greatest number.
        count: Number requested.
        is_own_limit: Whether the limit reached is that of the owner or of this process only, so others need not wait.

    Attributes:
        queue: Keys that plain HTTP and our own dialect send beside the released ones: `place`, `waited_s` and, if
            there is an estimate, `retry_after_s`.
    """

    def __init__(
        self, resource: str, in_use: int, cap: int, count: int = 1, *, is_own_limit: bool = False
    ) -> None:
        self._problem = f"no free {resource}" if count == 1 else f"no {count} free slots for a {resource}"
        self._usage = f"{in_use} of {cap} in use"
        super().__init__(
            CAPACITY_REACHED,
            f"{self._problem}: {self._usage}; try again later",
            {"active_sessions": in_use, "max_sessions": cap},
        )
        self.is_own_limit = is_own_limit
        self.queue: dict[str, Any] = {}

    def add_wait(self, waited_s: float, place: int, estimate_s: float | None) -> "FullError":
        """Add how long the request has waited, its place and the estimated wait; return the error itself."""
        within = f" within {waited_s:.3g} s" if waited_s >= 0.1 else ""
        usage = f"{self._usage}, and place {place} in the queue"
        self.message = f"{self._problem}{within}: {usage}; try again later"
        self.args = (self.message,)
        self.queue = {"place": place, "waited_s": round(waited_s, 3)}
        if estimate_s is not None:
            self.queue["retry_after_s"] = estimate_s
        return self


class UnknownSessionError(RefusalError):
    """There is no such session, or another owner has it; the error is the same for both."""

    def __init__(self, session_id: str) -> None:
        super().__init__(SESSION_ERROR, f"Unknown session_id: {short(session_id)}")


class SessionBusyError(RefusalError):
    """Too many calls wait for one session. The session itself is unaffected."""

    def __init__(self, waiting: int) -> None:
        text = f"the session is busy (calls ahead: {waiting}); make one call at a time, or try again later"
        super().__init__(EXECUTION_ERROR, text)


class DeadlineExceededError(RefusalError):
    """A call exceeded its deadline, and its session has been ended."""

    def __init__(self, limit_s: float | None) -> None:
        text = f"the environment did not answer within {limit_s:g} s; its session has been ended"
        super().__init__(SESSION_ERROR, text)
