"""Slots: how many sessions there may be, of all callers and of one; and what is said when there is none."""

from collections import Counter
from typing import Protocol

from openenv_core.protocol.errors import CAPACITY_REACHED, EXECUTION_ERROR, SESSION_ERROR, RefusalError, short


class SessionSlots(Protocol):
    """Counts sessions against a cap."""

    @property
    def active(self) -> int:
        """Slots in use."""

    @property
    def cap(self) -> int:
        """The greatest number of slots in use at once."""

    def take(self, owner: str, count: int = 1) -> None:
        """Take slots for a caller, all of them or none.

        Raises:
            RefusalError: CAPACITY_REACHED, with active_sessions and max_sessions.
        """

    def give(self, owner: str) -> None:
        """Give a slot back that this caller has taken."""

    @property
    def ending(self) -> int:
        """Sessions that hold a slot and are about to give it back."""

    def end(self, change: int) -> None:
        """Count one more of these, or one less."""


class LocalSlots:
    """The slots of one process.

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

    @property
    def active(self) -> int:
        """Slots in use."""
        return self._active

    @property
    def cap(self) -> int:
        """The greatest number of slots in use at once."""
        return self._cap

    def take(self, owner: str, count: int = 1) -> None:
        """Take slots for a caller, all of them or none.

        Raises:
            RefusalError: CAPACITY_REACHED.
        """
        if self._active + count > self._cap:
            raise full("session", self._active, self._cap, count)
        if self._per_owner is not None and self._taken[owner] + count > self._per_owner:
            raise full("session of this token", self._taken[owner], self._per_owner, count)
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
        """Sessions that are about to give their slots back."""
        return self._ending

    def end(self, change: int) -> None:
        """Count one more of these, or one less."""
        self._ending += change


def full(what: str, taken: int, cap: int, count: int = 1) -> RefusalError:
    """Return the refusal of a caller for whom there is no slot, or not as many as it wants."""
    wanted = f"a free {what}" if count == 1 else f"{count} times a free {what}"
    return RefusalError(
        CAPACITY_REACHED,
        f"expected {wanted}, got {taken} of {cap} in use; try again later",
        {"active_sessions": taken, "max_sessions": cap},
    )


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
