"""Slots: how many sessions there may be, of all callers and of one; who waits; and what is said when there is none."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

from openenv_core.protocol.errors import CAPACITY_REACHED, EXECUTION_ERROR, SESSION_ERROR, RefusalError, short


class SessionSlots:
    """Counts sessions against a cap, and newcomers that wait, by when they came (`time.monotonic_ns`): of one process.

    `servers.fleet.slots` counts those of several together.

    Args:
        cap: The greatest number of sessions.
        per_owner: The greatest number of sessions of one caller; None: only the cap.
    """

    def __init__(self, cap: int, per_owner: int | None = None) -> None:
        self._cap = cap
        self._per_owner = per_owner
        self._taken: Counter[str] = Counter()
        self._active = 0
        self._ending = 0
        self._arrivals: list[int] = []

    @property
    def active(self) -> int:
        """Slots in use."""
        return self._active

    @property
    def cap(self) -> int:
        """The greatest number of slots in use at once."""
        return self._cap

    @property
    def total(self) -> int:
        """The same over all processes of the server."""
        return self._cap

    @property
    def by_worker(self) -> list[int]:
        """Slots in use, of the one process."""
        return [self._active]

    @property
    def most(self) -> int:
        """The greatest number of slots that one caller may have at once."""
        return self.cap if self._per_owner is None else min(self.cap, self._per_owner)

    def lack(self, owner: str, count: int) -> "FullError | None":
        """Return why a caller cannot have so many slots now; None where it can."""
        if self._per_owner is not None and self._taken[owner] + count > self._per_owner:
            return FullError("session of this token", self._taken[owner], self._per_owner, count, own=True)
        if self._active + count > self._cap:
            return FullError("session", self._active, self._cap, count)
        return None

    def take(self, owner: str, count: int = 1, arrival: int | None = None) -> None:
        """Take slots for a caller, all of them or none.

        Args:
            owner: The caller.
            count: How many.
            arrival: When it came; whoever came before in another process and could be served goes first.

        Raises:
            FullError: There are not as many.
        """
        if (lack := self.lack(owner, count)) is not None:
            raise lack
        self._active += count
        self._taken[owner] += count

    def give(self, owner: str) -> None:
        """Give a slot back that this caller has taken."""
        self._active -= 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]

    @property
    def ending(self) -> int:
        """Sessions that hold a slot and are about to give it back."""
        return self._ending

    def end(self, change: int) -> None:
        """Count one more of these, or one less."""
        self._ending += change

    @property
    def waiting(self) -> int:
        """Newcomers that wait."""
        return len(self._arrivals)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call this when something may have come free that another process had, as long as anybody waits here."""

    def enqueue(self, arrival: int) -> None:
        """Count a newcomer that waits from now on; it came after all others of this process."""
        self._arrivals.append(arrival)

    def dequeue(self, arrival: int) -> None:
        """Count it no more."""
        del self._arrivals[bisect_left(self._arrivals, arrival)]

    def place(self, arrival: int) -> int:
        """Return the place of a newcomer in the order of arrival, from 1."""
        return bisect_left(self._arrivals, arrival) + 1

    def set_head(self, arrival: int | None) -> None:
        """Say who of this process is served next; None where nobody could be, whatever comes free."""


class FullError(RefusalError):
    """There is no slot, or not as many as a caller wants.

    Args:
        what: Of what there are too few.
        taken: How many are in use.
        cap: Of how many.
        count: How many the caller wants.
        own: The cap of the caller, or of this process, is reached, which holds up nobody else.

    Attributes:
        queue: What plain HTTP and our own dialect tell beside the released keys: `place`, `waited_s` and, where there
            is an estimate, `retry_after_s`.
    """

    def __init__(self, what: str, taken: int, cap: int, count: int = 1, *, own: bool = False) -> None:
        self._wanted = f"a free {what}" if count == 1 else f"{count} times a free {what}"
        self._got = f"{taken} of {cap} in use"
        super().__init__(
            CAPACITY_REACHED,
            f"expected {self._wanted}, got {self._got}; try again later",
            {"active_sessions": taken, "max_sessions": cap},
        )
        self.own = own
        self.queue: dict[str, Any] = {}

    def after(self, waited_s: float, place: int, estimate_s: float | None) -> "FullError":
        """Return it with what its caller has waited for in vain."""
        within = f" within {waited_s:.3g} s" if waited_s >= 0.1 else ""
        got = f"{self._got}, and place {place} in the queue"
        self.message = f"expected {self._wanted}{within}, got {got}; try again later"
        self.args = (self.message,)
        self.queue = {"place": place, "waited_s": round(waited_s, 3)}
        if estimate_s is not None:
            self.queue["retry_after_s"] = estimate_s
        return self


class UnknownSessionError(RefusalError):
    """There is no such session, or it is somebody else's: the answer is the same."""

    def __init__(self, session_id: str) -> None:
        super().__init__(SESSION_ERROR, f"Unknown session_id: {short(session_id)}")


class SessionBusyError(RefusalError):
    """Too many calls wait for one session, which lives."""

    def __init__(self, waiting: int) -> None:
        text = f"expected one call at a time in a session, got {waiting} that wait already; try again later"
        super().__init__(EXECUTION_ERROR, text)


class DeadlineExceededError(RefusalError):
    """The environment took too long, and its session has been ended for that."""

    def __init__(self, limit_s: float | None) -> None:
        text = f"expected the environment to answer within {limit_s:g} s, and it did not; its session has been ended"
        super().__init__(SESSION_ERROR, text)
