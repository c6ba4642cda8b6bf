"""The queue of requests for slots: first come, first served, as slots are returned."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from openenv_core.protocol.errors import RefusalError
from servers.execution import CLOSE_TIMEOUT_S
from servers.sessions.slots import FullError, SessionSlots

REQUEST_WAIT_S: Final = 4.0
"""Seconds that an HTTP request waits for a slot: HTTP clients time out after 5 s by default."""

DISCONNECT_NOTICE_S: Final = 0.1
"""Seconds within which the disconnect of a client is noticed. A queued request waits at least this long, unless it is
granted or refused before."""

NOTIFY_INTERVAL_S: Final = 1.0
"""Shortest interval between two frames that report the place in the queue, in seconds."""

_HOLD_SAMPLES: Final = 64
"""Number of ended sessions from whose length that of the next ones is estimated."""

Notify = Callable[[dict[str, Any]], Awaitable[None]]
"""Reports to a client the place, the length of the queue, and the estimated wait in seconds (None if unknown)."""


class Ticket:
    """A request's place in the queue, and then its slots. `SlotQueue.enter` creates it; call `leave` at the end.

    Attributes:
        owner: Owner of the slots.
        count: Number of slots requested, all at once.
        arrival: When the request arrived, in ns.
        granted: Done once the slots are granted or the request is refused.
        holds_slots: Whether the slots are granted and no session has them yet.
    """

    __slots__ = ("_queue", "arrival", "count", "granted", "holds_slots", "owner", "timer")

    def __init__(self, queue: "SlotQueue", owner: str, count: int, arrival: int) -> None:
        self.owner = owner
        self.count = count
        self.arrival = arrival
        self.holds_slots = False
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._queue = queue

    @property
    def is_waiting(self) -> bool:
        """Whether it is not yet granted or refused."""
        return not self.granted.done()

    async def wait_settled(self) -> bool:
        """Wait until it is granted or refused; return True."""
        await asyncio.wait([self.granted])
        return True

    async def wait_granted(self, notify: Notify | None = None) -> None:
        """Wait for the slots, which the caller then has to return. If cancelled, leave the queue.

        Args:
            notify: Called after a short wait, and then when the place has changed, at most once a second.

        Raises:
            RefusalError: No slots were returned in time, or the server refuses all new sessions.
        """
        try:
            last_place, pause_s = 0, None if notify is None else 2 * DISCONNECT_NOTICE_S
            while not (await asyncio.wait([self.granted], timeout=pause_s))[0]:
                assert notify is not None
                if (status := self._queue.status_of(self))["place"] != last_place:
                    last_place = status["place"]
                    await notify(status)
                pause_s = NOTIFY_INTERVAL_S
            self.granted.result()
            self.holds_slots = False
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the queue, or return slots that no session has. Idempotent."""
        self._queue.leave(self)


class SlotQueue:
    """Grants slots to requests in the order of arrival.

    A request that waits under its owner's own limit does not block others. A request for several slots is not
    overtaken by requests for one, so it is granted as soon as there are enough.

    Args:
        slots: Counts the slots.
        max_waiting: Greatest number of waiting requests.
        max_wait_s: Longest wait in seconds. Even with 0, a queued request waits at least `DISCONNECT_NOTICE_S`, and
            while sessions are ending up to `CLOSE_TIMEOUT_S` since its arrival.

    Attributes:
        get_refusal: Returns the error that refuses all requests, or None.
        on_grant: Called with the number of slots granted and the seconds waited.
    """

    def __init__(self, slots: SessionSlots, max_waiting: int, max_wait_s: float) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._tickets: dict[str, deque[Ticket]] = {}  # by owner; no empty ones
        self._requested_slots = 0  # slots, over all tickets
        self._last_arrival = 0
        self._hold_times_s: deque[float] = deque(maxlen=_HOLD_SAMPLES)
        self._last_return = 0.0
        self.get_refusal: Callable[[], RefusalError | None] = lambda: None
        self.on_grant: Callable[[int, float], None] = lambda slots, waited_s: None
        slots.listen(self.grant_slots)

    def enter(self, owner: str, count: int = 1, wait_s: float = REQUEST_WAIT_S) -> Ticket:
        """Request slots. The ticket returned may already be granted or refused.

        Args:
            owner: Owner of the slots.
            count: Number of slots, all or none.
            wait_s: Seconds to wait for them, at most the setting's.
        """
        self._last_arrival = max(self._last_arrival + 1, time.monotonic_ns())
        ticket = Ticket(self, owner, count, self._last_arrival)
        if (refusal := self.get_refusal()) is not None:
            _refuse(ticket, refusal)
            return ticket
        if count > self._slots.max_per_owner:
            refusal = self._slots.find_shortage(owner, count)
            assert refusal is not None
            _refuse(ticket, refusal)
            return ticket
        self._tickets.setdefault(owner, deque()).append(ticket)
        self._requested_slots += count
        self._slots.enqueue(ticket.arrival)
        self.grant_slots()
        if ticket.is_waiting and self._slots.waiting > self._max_waiting:
            self._expire(ticket)
        elif ticket.is_waiting:
            timeout_s = max(self.clamp_wait(wait_s), DISCONNECT_NOTICE_S)
            ticket.timer = asyncio.get_running_loop().call_later(timeout_s, self._check_timeout, ticket)
        return ticket

    def clamp_wait(self, wait_s: float) -> float:
        """Return the wait that a request may have, in seconds, given the one it asks for."""
        return min(wait_s, self._max_wait_s)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket from the queue, or return the slots that it holds."""
        if ticket.is_waiting:
            self._remove(ticket)
            ticket.granted.cancel()
            self.grant_slots()
        elif ticket.holds_slots:
            ticket.holds_slots = False
            for _ in range(ticket.count):
                self._slots.release(ticket.owner)
            self.grant_slots()

    def grant_slots(self) -> None:
        """Grant the free slots to the next requests; call it when slots have been returned."""
        skipped: set[str] = set()
        head: int | None = None
        while heads := [line[0] for owner, line in self._tickets.items() if owner not in skipped]:
            first = min(heads, key=lambda ticket: ticket.arrival)
            try:
                self._slots.acquire(first.owner, first.count, first.arrival)
            except FullError as full:
                if not full.is_own_limit:
                    head = first.arrival
                    break
                skipped.add(first.owner)
            else:
                self._remove(first)
                first.holds_slots = True
                first.granted.set_result(None)
                self.on_grant(first.count, max(0.0, time.monotonic() - first.arrival / 1e9))
        self._slots.set_head(head)

    def record_return(self, held_s: float) -> None:
        """Note how long a session held the slot that it has returned, and grant the slot to the next request."""
        self._hold_times_s.append(held_s)
        self._last_return = time.monotonic()
        self.grant_slots()

    def refuse_all(self, refusal: Callable[[], RefusalError]) -> None:
        """Refuse every waiting request."""
        for ticket in [ticket for line in self._tickets.values() for ticket in line]:
            self._remove(ticket)
            _refuse(ticket, refusal())

    def status_of(self, ticket: Ticket) -> dict[str, Any]:
        """Return what a waiting client is sent: its place, the length of the queue, and the estimated wait."""
        place = self._slots.place_of(ticket.arrival)
        return {"place": place, "waiting": self._slots.waiting, "estimate_s": self.estimate_wait_s(place)}

    def capacity(self) -> dict[str, Any]:
        """Return the server's slots and queue, with the estimated wait of a request that arrives now."""
        slots = self._slots
        place = slots.waiting + 1 if slots.waiting or slots.active >= slots.total else 0
        return {
            "slots": slots.total,
            "in_use": slots.active,
            "waiting": slots.waiting,
            "estimate_s": self.estimate_wait_s(place),
        }

    def estimate_wait_s(self, place: int) -> float | None:
        """Estimate the wait at a place in the queue, in seconds; None if no session has ended yet.

        By Little's law, `total` slots, each held for `mean_hold_s`, are returned at the rate `total / mean_hold_s`.
        The sessions that hold one now have held it at least since the last return.
        """
        if not place:
            return 0.0
        if not self._hold_times_s:
            return None
        mean_hold_s = max(
            sum(self._hold_times_s) / len(self._hold_times_s), time.monotonic() - self._last_return
        )
        tickets = sum(map(len, self._tickets.values()))
        slots_per_ticket = self._requested_slots / tickets if tickets else 1
        return round(place * slots_per_ticket * mean_hold_s / self._slots.total, 3)

    def _check_timeout(self, ticket: Ticket) -> None:
        """Refuse a request that has waited too long, unless ending sessions are about to return slots."""
        left_s = ticket.arrival / 1e9 + CLOSE_TIMEOUT_S - time.monotonic()
        if self._slots.ending and left_s > 0:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(min(left_s, DISCONNECT_NOTICE_S), self._check_timeout, ticket)
        else:
            self._expire(ticket)

    def refusal_of(self, ticket: Ticket, waited_s: float) -> RefusalError:
        """Return the error for a request still in the queue that has waited this many seconds."""
        slots = self._slots
        refusal = slots.find_shortage(ticket.owner, ticket.count)
        if refusal is None:  # the free slots belong to earlier requests
            refusal = FullError("session", slots.active, slots.total, ticket.count)
        place = slots.place_of(ticket.arrival)
        if waited_s > DISCONNECT_NOTICE_S * 2 or slots.waiting > self._max_waiting:
            refusal = refusal.add_wait(waited_s, place, self.estimate_wait_s(place))
        return refusal

    def _expire(self, ticket: Ticket) -> None:
        refusal = self.refusal_of(ticket, time.monotonic() - ticket.arrival / 1e9)
        self._remove(ticket)
        _refuse(ticket, refusal)
        self.grant_slots()

    def _remove(self, ticket: Ticket) -> None:
        line = self._tickets[ticket.owner]
        line.remove(ticket)
        if not line:
            del self._tickets[ticket.owner]
        self._requested_slots -= ticket.count
        self._slots.dequeue(ticket.arrival)
        if ticket.timer is not None:
            ticket.timer.cancel()


def _refuse(ticket: Ticket, refusal: RefusalError) -> None:
    ticket.granted.set_exception(refusal)
    ticket.granted.exception()  # mark it retrieved: the client may have disconnected


class Slot:
    """A slot that has been granted, until it is released, which happens once.

    Attributes:
        taken_at: When it was granted, by the event loop's clock.
        held: Whether it has not been released.
    """

    __slots__ = ("_ending", "_owner", "_queue", "_slots", "held", "taken_at")

    def __init__(self, slots: SessionSlots, queue: SlotQueue, owner: str) -> None:
        self.taken_at = asyncio.get_running_loop().time()
        self.held = True
        self._slots = slots
        self._queue = queue
        self._owner = owner
        self._ending = False

    def mark_ending(self) -> None:
        """Let requests that wait know that it is about to be released."""
        if self.held and not self._ending:
            self._ending = True
            self._slots.add_ending(1)

    def release(self, *, was_used: bool = True) -> None:
        """Release it, if it is still held; `was_used`: its time counts for the estimate of how long others wait."""
        if not self.held:
            return
        self.held = False
        self._slots.release(self._owner)
        if self._ending:
            self._slots.add_ending(-1)
        if was_used:
            self._queue.record_return(asyncio.get_running_loop().time() - self.taken_at)
        else:
            self._queue.grant_slots()
