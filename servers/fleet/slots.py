"""The cap on sessions, over all workers together.

One table in memory that all workers share: a row a worker, a column a caller. A lock of the kernel's guards it,
which the kernel takes away from a worker that dies; the row of that worker is then cleared by the supervisor.
Taking a slot costs a few microseconds, once a session.
"""

import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from openenv_core.protocol.errors import RefusalError
from servers.sessions.slots import full

logger = logging.getLogger("servers")

_COUNT_BYTES = 4

LOCK_TIMEOUT_S: Final = 0.5
"""Seconds after which a lock that takes microseconds is held by somebody who does not run."""
POLL_INTERVAL_S: Final = 0.0005
"""Between two attempts to get it."""
LOCK_BACKOFF_S: Final = 5.0
"""For so long nobody waits for it again."""


class SlotTable:
    """Counts of slots in use: `workers` rows of `columns`; and of the sessions that are ending, one a worker.

    Args:
        fd: An open file of `size` bytes, zeros at first.
        workers: How many rows.
        columns: How many columns.
    """

    def __init__(self, fd: int, workers: int, columns: int) -> None:
        self._fd = fd
        self._workers = workers
        self._columns = columns
        self._memory = mmap.mmap(fd, self.size(workers, columns))
        counts = memoryview(self._memory).cast("I")
        self._counts, self._ending = counts[: workers * columns], counts[workers * columns :]
        self._patient_from = 0.0

    @staticmethod
    def size(workers: int, columns: int) -> int:
        """Return the bytes that a table takes."""
        return workers * (columns + 1) * _COUNT_BYTES

    @classmethod
    def create(cls, workers: int, columns: int) -> int:
        """Return a descriptor of a new file without a name, for a table of this size."""
        with tempfile.TemporaryFile() as file:
            file.truncate(cls.size(workers, columns))
            return os.dup(file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes out.

        A process that is frozen while it has the lock stops nobody: after a moment the others go on without it. Each
        writes its own row alone, so the worst that comes of it is one session too many.
        """
        held = self._lock()
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        began = time.monotonic()
        while True:
            with suppress(BlockingIOError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if (now := time.monotonic()) - began > LOCK_TIMEOUT_S or now < self._patient_from:
                if now >= self._patient_from:
                    logger.warning(
                        "the lock of the slots is held by a process that does not run; going on without it"
                    )
                    self._patient_from = now + LOCK_BACKOFF_S
                return False
            time.sleep(POLL_INTERVAL_S)

    def row(self, worker: int) -> int:
        """Return the slots in use in one worker."""
        start = worker * self._columns
        return sum(self._counts[start : start + self._columns])

    def column(self, column: int) -> int:
        """Return the slots in use of one caller."""
        return sum(self._counts[column :: self._columns])

    def total(self) -> int:
        """Return all slots in use."""
        return sum(self._counts)

    def add(self, worker: int, column: int, change: int) -> None:
        """Change one count."""
        self._counts[worker * self._columns + column] += change

    def ending(self) -> int:
        """Return the sessions that are about to give their slots back."""
        return sum(self._ending)

    def end(self, worker: int, change: int) -> None:
        """Count one more of these, or one less."""
        self._ending[worker] += change

    def clear(self, worker: int) -> None:
        """Give back what a dead worker had taken."""
        with self.locked():
            for column in range(self._columns):
                self._counts[worker * self._columns + column] = 0
            self._ending[worker] = 0

    def close(self) -> None:
        """Let go of the memory and the file."""
        self._counts.release()
        self._ending.release()
        self._memory.close()
        os.close(self._fd)


class SharedSlots:
    """The slots as one worker sees them.

    Args:
        table: The counts of all workers.
        worker: This worker's index.
        workers: How many there are.
        owners: The names of all callers, the same in every worker.
        total: The cap over all workers.
        local: The cap in one worker; that of the whole, or 1 where a process takes no second environment.
        per_owner: The cap on the sessions of one caller, over all workers; None: no cap.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        worker: int,
        workers: int,
        owners: Sequence[str],
        total: int,
        local: int,
        per_owner: int | None,
    ) -> None:
        self._table = table
        self._worker = worker
        self._workers = workers
        self._columns = {owner: column for column, owner in enumerate(owners)}
        self._total = total
        self._local = local
        self._per_owner = per_owner

    @property
    def active(self) -> int:
        """Slots in use, over all workers."""
        return self._table.total()

    @property
    def cap(self) -> int:
        """The greatest number of slots in use at once in this worker."""
        return min(self._total, self._local)

    def take(self, owner: str, count: int = 1) -> None:
        """Take slots for a caller, all of them or none. RefusalError: CAPACITY_REACHED."""
        column = self._columns[owner]
        with self._table.locked():
            refusal = self._refusal(column, count)
            if refusal is None:
                self._table.add(self._worker, column, count)
        if refusal is not None:
            raise refusal

    def give(self, owner: str) -> None:
        """Give a slot back that this caller has taken."""
        with self._table.locked():
            self._table.add(self._worker, self._columns[owner], -1)

    @property
    def ending(self) -> int:
        """Sessions that are about to give their slots back, over all workers."""
        return self._table.ending()

    def end(self, change: int) -> None:
        """Count one more of these in this worker, or one less."""
        self._table.end(self._worker, change)

    def elsewhere(self) -> int | None:
        """Return a worker that has room, where this one has none but others do."""
        if self._local >= self._total or self._table.row(self._worker) < self._local:
            return None
        rows = [(self._table.row(worker), worker) for worker in range(self._workers)]
        taken, worker = min(rows)
        return worker if taken < self._local else None

    def _refusal(self, column: int, count: int) -> RefusalError | None:
        table = self._table
        if (taken := table.total()) + count > self._total:
            return full("session", taken, self._total, count)
        if (taken := table.row(self._worker)) + count > self._local:
            return full("session in this worker process", taken, self._local, count)
        if self._per_owner is not None and (taken := table.column(column)) + count > self._per_owner:
            return full("session of this token", taken, self._per_owner, count)
        return None
