"""The queue of newcomers: first come, first served, as slots come back."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from openenv_core.protocol.errors import RefusalError
from servers.execution import CLOSE_TIMEOUT_S
from servers.sessions.slots import FullError, SessionSlots

REQUEST_WAIT_S: Final = 4.0
"""Seconds that an HTTP request waits for a slot: clients of HTTP give up on a silent server after 5 by default."""

DISCONNECT_NOTICE_S: Final = 0.1
"""Seconds that it takes at most to hear of a client that has left. Every newcomer waits for so long."""

TELL_INTERVAL_S: Final = 1.0
"""Between two frames that tell a newcomer its place."""

_HOLDS: Final = 64
"""Sessions that have ended from which the next ones' length is estimated."""

Tell = Callable[[dict[str, Any]], Awaitable[None]]
"""Tells a newcomer its place, how many wait, and in about how many seconds its turn comes; None: nobody knows."""


class Ticket:
    """A newcomer's place in the queue, and then its slots. `SlotQueue.enter` gives it; whoever has it leaves at last.

    Attributes:
        owner: The caller.
        count: How many slots it wants, all at once.
        arrival: When it came, in ns.
        holds: The slots are its own, and nobody's session has them yet.
    """

    __slots__ = ("_queue", "arrival", "count", "granted", "holds", "owner", "timer")

    def __init__(self, queue: "SlotQueue", owner: str, count: int, arrival: int) -> None:
        self.owner = owner
        self.count = count
        self.arrival = arrival
        self.holds = False
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._queue = queue

    @property
    def waits(self) -> bool:
        """Whether it is neither granted nor refused yet."""
        return not self.granted.done()

    async def settled(self) -> bool:
        """Wait until it is granted or refused; return True."""
        await asyncio.wait([self.granted])
        return True

    async def take(self, tell: Tell | None = None) -> None:
        """Wait for the slots, which are the caller's to give back from then on; cancelled, leave.

        Args:
            tell: Called after a moment, and then whenever the place has changed, at most once a second.

        Raises:
            RefusalError: None came free in time, or the server takes nobody any more.
        """
        try:
            told, pause_s = 0, None if tell is None else 2 * DISCONNECT_NOTICE_S
            while not (await asyncio.wait([self.granted], timeout=pause_s))[0]:
                assert tell is not None
                if (status := self._queue.status_of(self))["place"] != told:
                    told = status["place"]
                    await tell(status)
                pause_s = TELL_INTERVAL_S
            self.granted.result()
            self.holds = False
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the queue, or give back slots that no session has got. Idempotent."""
        self._queue.leave(self)


class SlotQueue:
    """Hands slots to newcomers in the order in which they came.

    Whoever waits for a slot under his own cap holds nobody up. Whoever wants several at once is not overtaken by those
    that want one, so he gets them as soon as there are as many.

    Args:
        slots: Counts.
        max_waiting: The greatest number of newcomers that wait at once.
        max_wait_s: The longest wait; with 0 a newcomer waits only for clients that are about to be gone.

    Attributes:
        refusal: Returns why nobody is taken at all, if that is so.
        on_grant: Told how many slots a newcomer gets, and after how many seconds.
    """

    def __init__(self, slots: SessionSlots, max_waiting: int, max_wait_s: float) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._lines: dict[str, deque[Ticket]] = {}  # one a caller, none empty
        self._wanted = 0  # slots, by all of them
        self._last_arrival = 0
        self._held_s: deque[float] = deque(maxlen=_HOLDS)
        self._last_return = 0.0
        self.refusal: Callable[[], RefusalError | None] = lambda: None
        self.on_grant: Callable[[int, float], None] = lambda slots, waited_s: None
        slots.listen(self.wake)

    def enter(self, owner: str, count: int = 1, wait_s: float = REQUEST_WAIT_S) -> Ticket:
        """Ask for slots. The ticket that is returned may be granted or refused already.

        Args:
            owner: The caller.
            count: How many slots, all or none.
            wait_s: Seconds to wait for them; the setting bounds it.
        """
        self._last_arrival = max(self._last_arrival + 1, time.monotonic_ns())
        ticket = Ticket(self, owner, count, self._last_arrival)
        if (refusal := self.refusal()) is not None:
            _refuse(ticket, refusal)
            return ticket
        if count > self._slots.most:
            refusal = self._slots.lack(owner, count)
            assert refusal is not None
            _refuse(ticket, refusal)
            return ticket
        self._lines.setdefault(owner, deque()).append(ticket)
        self._wanted += count
        self._slots.enqueue(ticket.arrival)
        self.wake()
        if ticket.waits and self._slots.waiting > self._max_waiting:
            self._expire(ticket)
        elif ticket.waits:
            patience_s = max(self.clamp_wait(wait_s), DISCONNECT_NOTICE_S)
            ticket.timer = asyncio.get_running_loop().call_later(patience_s, self._look_again, ticket)
        return ticket

    def clamp_wait(self, wait_s: float) -> float:
        """Return how long one may wait that asks for so many seconds."""
        return min(wait_s, self._max_wait_s)

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket back, with the slots that it holds."""
        if ticket.waits:
            self._remove(ticket)
            ticket.granted.cancel()
            self.wake()
        elif ticket.holds:
            ticket.holds = False
            for _ in range(ticket.count):
                self._slots.give(ticket.owner)
            self.wake()

    def wake(self) -> None:
        """Hand out what is free to those whose turn it is. To be called when slots have come back."""
        passed: set[str] = set()
        head: int | None = None
        while heads := [line[0] for owner, line in self._lines.items() if owner not in passed]:
            first = min(heads, key=lambda ticket: ticket.arrival)
            try:
                self._slots.take(first.owner, first.count, first.arrival)
            except FullError as full:
                if not full.own:
                    head = first.arrival
                    break
                passed.add(first.owner)
            else:
                self._remove(first)
                first.holds = True
                first.granted.set_result(None)
                self.on_grant(first.count, max(0.0, time.monotonic() - first.arrival / 1e9))
        self._slots.set_head(head)

    def returned(self, held_s: float) -> None:
        """Hand out a slot that a session has given back, which had it for so many seconds."""
        self._held_s.append(held_s)
        self._last_return = time.monotonic()
        self.wake()

    def refuse_all(self, refusal: Callable[[], RefusalError]) -> None:
        """Refuse everybody that waits."""
        for ticket in [ticket for line in self._lines.values() for ticket in line]:
            self._remove(ticket)
            _refuse(ticket, refusal())

    def status_of(self, ticket: Ticket) -> dict[str, Any]:
        """Return what a newcomer is told of its place."""
        place = self._slots.place(ticket.arrival)
        return {"place": place, "waiting": self._slots.waiting, "estimate_s": self.estimate_s(place)}

    def capacity(self) -> dict[str, Any]:
        """Return what a server tells of its slots; the estimate is that of a newcomer of now."""
        slots = self._slots
        place = slots.waiting + 1 if slots.waiting or slots.active >= slots.total else 0
        return {
            "slots": slots.total,
            "in_use": slots.active,
            "waiting": slots.waiting,
            "estimate_s": self.estimate_s(place),
        }

    def estimate_s(self, place: int) -> float | None:
        """Return in about how many seconds the turn of a place comes; None where nobody knows.

        By Little's law: `total` slots, each held for so long on average, come back at the rate of total / length. Those
        that hold one now have done so for as long as none came back, at least.
        """
        if not place:
            return 0.0
        if not self._held_s:
            return None
        held_s = max(sum(self._held_s) / len(self._held_s), time.monotonic() - self._last_return)
        tickets = sum(map(len, self._lines.values()))
        each = self._wanted / tickets if tickets else 1
        return round(place * each * held_s / self._slots.total, 3)

    def _look_again(self, ticket: Ticket) -> None:
        """Refuse a newcomer whose time is over, unless slots are about to come back."""
        left_s = ticket.arrival / 1e9 + CLOSE_TIMEOUT_S - time.monotonic()
        if self._slots.ending and left_s > 0:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(min(left_s, DISCONNECT_NOTICE_S), self._look_again, ticket)
        else:
            self._expire(ticket)

    def refusal_of(self, ticket: Ticket, waited_s: float) -> RefusalError:
        """Return what is said to who has waited for so many seconds, at a place of the queue that is still there."""
        slots = self._slots
        refusal = slots.lack(ticket.owner, ticket.count)
        if refusal is None:  # there would be room, but for those that came before
            refusal = FullError("session", slots.active, slots.total, ticket.count)
        place = slots.place(ticket.arrival)
        if waited_s > DISCONNECT_NOTICE_S * 2 or slots.waiting > self._max_waiting:
            refusal = refusal.after(waited_s, place, self.estimate_s(place))
        return refusal

    def _expire(self, ticket: Ticket) -> None:
        refusal = self.refusal_of(ticket, time.monotonic() - ticket.arrival / 1e9)
        self._remove(ticket)
        _refuse(ticket, refusal)
        self.wake()

    def _remove(self, ticket: Ticket) -> None:
        line = self._lines[ticket.owner]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.owner]
        self._wanted -= ticket.count
        self._slots.dequeue(ticket.arrival)
        if ticket.timer is not None:
            ticket.timer.cancel()


def _refuse(ticket: Ticket, refusal: RefusalError) -> None:
    ticket.granted.set_exception(refusal)
    ticket.granted.exception()  # seen: its owner may have left
