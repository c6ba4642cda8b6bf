"""The cap on sessions and the queue of newcomers over all workers together.

One table in shared memory, with a row per worker and a column per caller. A file lock guards it, which the kernel
releases when its holder dies; the supervisor then clears the row of the dead worker. Taking a slot costs a few
microseconds, once per session. Each worker has a pipe by which the others wake it when it has waiting newcomers and a
slot may be free.
"""

import asyncio
import fcntl
import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from servers.metrics import create_unnamed_file
from servers.sessions.slots import FullError, SessionSlots

_NUMBER_BYTES: Final = 8
_HEAD, _HEARTBEAT, _ENDING, _WAITING, _COUNTS = range(5)
"""Places in a worker's row, the last one of its first count."""

LOCK_TIMEOUT_S: Final = 0.1
"""Seconds to wait for the lock, which is normally held for microseconds; a holder beyond that is not running."""
POLL_INTERVAL_S: Final = 0.0005
"""Interval of attempts to acquire the lock."""

HEARTBEAT_INTERVAL_S: Final = 1.0
"""Interval at which a worker checks its queue if nothing wakes it."""
HEARTBEAT_TIMEOUT_S: Final = 3.0
"""Seconds without a heartbeat after which a worker's newcomers no longer hold up those of others."""


class SlotTable:
    """Slots in use, as `workers` rows of `columns` counts; and, per worker, the ending sessions and the queue.

    Args:
        fd: An open file of `size` bytes, initially zero.
        workers: Number of rows.
        columns: Number of columns.
        queue_size: Newcomers that may wait in one worker; a queue has room for one more, the one to be refused.
        wakers: A file descriptor per worker; a byte written to it wakes the worker.

    Attributes:
        rows: The numbers of each worker.
        counts: The part of a row with its slots in use, by column.
        arrivals: The part with its queue.
    """

    def __init__(
        self, fd: int, workers: int, columns: int, queue_size: int, wakers: Sequence[int] = ()
    ) -> None:
        self._fd = fd
        self._wakers = wakers
        numbers = memoryview(mmap.mmap(fd, self.size(workers, columns, queue_size))).cast("Q")
        size = len(numbers) // workers
        self.rows = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        self.counts = [row[_COUNTS : _COUNTS + columns] for row in self.rows]
        self.arrivals = [row[_COUNTS + columns :] for row in self.rows]

    @staticmethod
    def size(workers: int, columns: int, queue_size: int) -> int:
        """Return the size of a table in bytes."""
        return workers * (_COUNTS + columns + queue_size + 1) * _NUMBER_BYTES

    @classmethod
    def create(cls, workers: int, columns: int, queue_size: int) -> int:
        """Return a file descriptor of a new unnamed file for a table of this size."""
        return create_unnamed_file(cls.size(workers, columns, queue_size))

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the lock of the table, if it can be acquired within LOCK_TIMEOUT_S.

        A process that is stopped while it holds the lock blocks nobody: the others continue without the lock. Each
        process writes only its own row, so the worst consequence is one session too many.
        """
        acquired = self._lock()
        try:
            yield
        finally:
            if acquired:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(POLL_INTERVAL_S)
        return False

    def dequeue(self, worker: int, arrival: int) -> None:
        """Remove a newcomer from its worker's queue, if it is there."""
        arrivals, size = self.arrivals[worker], self.rows[worker][_WAITING]
        index = bisect_left(arrivals, arrival, 0, size)
        if index < size and arrivals[index] == arrival:
            arrivals[index : size - 1] = arrivals[index + 1 : size]
            self.rows[worker][_WAITING] = size - 1

    def wake_others(self, worker: int | None = None) -> None:
        """Wake the other workers that have waiting newcomers."""
        for other, waker in enumerate(self._wakers):
            if other != worker and self.rows[other][_WAITING]:
                with suppress(BlockingIOError):  # the pipe is full: enough to wake it
                    os.write(waker, b"\0")

    def clear(self, worker: int) -> None:
        """Return the slots of a dead worker."""
        with self.hold_lock():
            for place in range(_COUNTS + len(self.counts[worker])):
                self.rows[worker][place] = 0
        self.wake_others()


class SharedSlots(SessionSlots):
    """The slots as seen by one worker.

    Args:
        table: The counts of all workers.
        worker: This worker's index.
        owners: The names of all callers, in the same order in every worker.
        total: The cap over all workers.
        local: The cap per worker: `total`, or 1 if a process can hold only one environment.
        per_owner: The cap per caller over all workers; None: no cap.
        waker: The file descriptor that becomes readable when another worker wakes this one.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        worker: int,
        owners: Sequence[str],
        total: int,
        local: int,
        per_owner: int | None,
        waker: int = -1,
    ) -> None:
        super().__init__(total, per_owner, local)
        self._table, self._worker, self._waker = table, worker, waker
        self._row = table.rows[worker]
        self._columns = {owner: column for column, owner in enumerate(owners)}
        self._on_release: Callable[[], None] = lambda: None
        self._local_waiting = 0  # newcomers waiting in this worker
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> int:
        """Slots in use over all workers."""
        return sum(self.by_worker)

    @property
    def by_worker(self) -> list[int]:
        """Slots in use in each worker."""
        return list(map(sum, self._table.counts))

    @property
    def local_active(self) -> int:
        """Slots in use in this worker."""
        return sum(self._table.counts[self._worker])

    def count_owner(self, owner: str) -> int:
        """Return the slots that a caller has in all workers."""
        return sum(counts[self._columns[owner]] for counts in self._table.counts)

    def acquire(self, owner: str, count: int = 1, arrival: int | None = None) -> None:
        """Take slots for a caller, all or none, in order of arrival over all workers; FullError if too few are free."""
        table = self._table
        with table.hold_lock():
            shortage = self.find_shortage(owner, count)
            if shortage is None and arrival is not None and self._has_earlier(arrival):
                shortage = FullError("session", self.active, self.total, count)
            if shortage is None:
                if arrival is not None:  # first, lest other workers count the newcomer twice
                    table.dequeue(self._worker, arrival)
                table.counts[self._worker][self._columns[owner]] += count
        if shortage is not None:
            raise shortage

    def _has_earlier(self, arrival: int) -> bool:
        """Return whether the next newcomer of another live worker arrived earlier."""
        oldest = time.monotonic_ns() - int(HEARTBEAT_TIMEOUT_S * 1e9)
        others = (row for row in self._table.rows if row is not self._row)
        return any(0 < row[_HEAD] < arrival and row[_HEARTBEAT] > oldest for row in others)

    def release(self, owner: str) -> None:
        """Return a slot of this caller."""
        with self._table.hold_lock():
            self._table.counts[self._worker][self._columns[owner]] -= 1
        self._table.wake_others(self._worker)

    @property
    def ending(self) -> int:
        """Sessions about to return their slots, over all workers."""
        return sum(row[_ENDING] for row in self._table.rows)

    def add_ending(self, change: int) -> None:
        """Add `change` to this worker's ending sessions."""
        self._row[_ENDING] += change

    @property
    def waiting(self) -> int:
        """Waiting newcomers over all workers."""
        return sum(row[_WAITING] for row in self._table.rows)

    def listen(self, on_release: Callable[[], None]) -> None:
        """Set the callback for slots that may be free in other workers; called only while a newcomer waits here."""
        self._on_release = on_release

    def enqueue(self, arrival: int) -> None:
        """Add a newcomer, the latest one, to this worker's queue, unless that is full."""
        arrivals = self._table.arrivals[self._worker]
        with self._table.hold_lock():
            size = self._row[_WAITING]
            if size < len(arrivals):
                arrivals[size] = arrival
                self._row[_WAITING] = size + 1
        self._local_waiting += 1
        if self._local_waiting == 1:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeat)
            if self._waker >= 0:
                loop.add_reader(self._waker, self._on_wake)

    def dequeue(self, arrival: int) -> None:
        """Remove a newcomer from this worker's queue."""
        with self._table.hold_lock():
            self._table.dequeue(self._worker, arrival)
        self._local_waiting -= 1
        if not self._local_waiting:
            assert self._timer is not None
            self._timer.cancel()
            if self._waker >= 0:
                asyncio.get_running_loop().remove_reader(self._waker)

    def place_of(self, arrival: int) -> int:
        """Return a newcomer's place in the order of arrival over all workers, from 1."""
        queues = zip(self._table.arrivals, self._table.rows, strict=True)
        return sum(bisect_left(queue, arrival, 0, row[_WAITING]) for queue, row in queues) + 1

    def set_head(self, arrival: int | None) -> None:
        """Set this worker's next newcomer; if it changes, wake the other workers, one of which may now be first."""
        head, self._row[_HEAD] = self._row[_HEAD], arrival or 0
        self._row[_HEARTBEAT] = time.monotonic_ns()
        if head != self._row[_HEAD] and self.active < self.total:
            self._table.wake_others(self._worker)

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._waker, 65_536)
        self._on_release()

    def _send_heartbeat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeat)
        self._on_release()

    def find_free_worker(self) -> int | None:
        """Return another worker with room if this one has none; otherwise None."""
        if self.cap >= self.total or self.local_active < self.cap:
            return None
        used, worker = min((used, worker) for worker, used in enumerate(self.by_worker))
        return worker if used < self.cap else None
