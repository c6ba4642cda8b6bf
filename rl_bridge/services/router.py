"""Which replica a call goes to: the least loaded one that does its work."""

from dataclasses import dataclass

SUSPECT_AFTER = 3
"""Calls of a replica that fail in a row before it is a suspect."""
FIRST_SUSPENSION_S = 0.5
LONGEST_SUSPENSION_S = 30.0


@dataclass(slots=True)
class _Load:
    in_flight: int = 0
    picked: int = 0
    failures: int = 0
    suspended_until: float = 0.0
    suspension_s: float = 0.0


class Router:
    """Counts what each replica has in flight, and keeps calls away from one that fails them all.

    A replica that fails fast always has the least in flight. So after some failures in a row it is suspended:
    for a while calls go elsewhere, where there is an elsewhere; then one failure is enough to suspend it for
    twice as long. A call that succeeds clears it.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._picks = 0

    def add(self, replica: int) -> None:
        """Let a replica be picked."""
        self._loads[replica] = _Load()

    def remove(self, replica: int) -> None:
        """Forget a replica and what it had in flight."""
        self._loads.pop(replica, None)

    def pick(self, now: float) -> int | None:
        """Name the replica for the next call: the least loaded, of these the one that was idle longest.

        Args:
            now: Seconds on any clock that only goes forward.

        Returns:
            Its id, or None where there is none.
        """
        if not self._loads:
            return None
        free = {replica: load for replica, load in self._loads.items() if load.suspended_until <= now}
        if free:
            return min(free, key=lambda replica: (free[replica].in_flight, free[replica].picked))
        # All are suspended: the one whose time ends first, for a call must go somewhere.
        return min(self._loads, key=lambda replica: self._loads[replica].suspended_until)

    def begin(self, replica: int) -> None:
        """A call to the replica begins."""
        load = self._loads.get(replica)
        if load is not None:
            self._picks += 1
            load.picked = self._picks
            load.in_flight += 1

    def end(self, replica: int, *, failed: bool | None, now: float) -> bool:
        """A call to the replica has ended.

        Args:
            replica: Its id.
            failed: Whether the call raised; None where it was given up, which tells nothing.
            now: Seconds on the clock of `pick`.

        Returns:
            True where the replica has just become a suspect, and should be asked for its health.
        """
        load = self._loads.get(replica)
        if load is None:
            return False
        load.in_flight -= 1
        if failed is None:
            return False
        if not failed:
            load.failures = 0
            load.suspended_until = load.suspension_s = 0.0
            return False
        load.failures += 1
        # What was in flight when it was suspended says nothing new.
        if load.failures < SUSPECT_AFTER or load.suspended_until > now:
            return False
        load.suspension_s = min(max(2 * load.suspension_s, FIRST_SUSPENSION_S), LONGEST_SUSPENSION_S)
        load.suspended_until = now + load.suspension_s
        return True

    def is_suspended(self, replica: int, now: float) -> bool:
        """Whether calls are kept away from the replica."""
        load = self._loads.get(replica)
        return load is not None and load.suspended_until > now
