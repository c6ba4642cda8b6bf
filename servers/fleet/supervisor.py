"""The supervisor: starts, restarts and ends the worker processes; it serves no requests itself."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.packages import module_command
from servers.fleet.slots import SlotTable
from servers.fleet.worker import FAILED, READY, WorkerPlan
from servers.listening import stop_signals
from servers.metrics import SharedCounts

logger = logging.getLogger("servers")

MAX_FAILED_STARTS: Final = 3
"""Consecutive deaths of a worker before it is healthy that end the fleet."""

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
STEADY_UPTIME_S: Final = 10.0
"""A worker that lived this long is restarted at once."""

REPORT_TIMEOUT_S: Final = 1.0
"""Seconds to wait, at a worker's end, for what it has said; a process that it has left may keep its end open."""

KILL_AFTER_DRAIN_S: Final = 5.0
"""Seconds beyond the drain after which workers are killed; they end themselves sooner."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    plan: WorkerPlan
    process: asyncio.subprocess.Process | None = None
    output: bytes = b""  # what it has reported about its start

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Keeps the workers of a fleet running.

    Args:
        plan: The workers' plan; index, file descriptors and folder are filled in here.
        listeners: The sockets of the workers: one each, or one for all.
        on_started: Called once, when the first worker accepts connections.
    """

    def __init__(
        self, plan: WorkerPlan, listeners: Sequence[socket.socket], on_started: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._listeners = listeners
        self._on_started: Callable[[], None] | None = on_started
        self._columns = max(1, len(plan.settings.tokens))  # one per possible caller
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._cordoned = False
        self._status = 0
        self._interrupts = 0

    async def run(self) -> int:
        """Run the fleet until SIGINT, SIGTERM or SIGHUP; return the exit status.

        Raises:
            ConfigurationError: A worker cannot start, for the reason that it has reported.
        """
        plan = self._plan
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        folder = tempfile.mkdtemp(prefix="ropewalk-")  # 0700: other users cannot reach the private sockets
        queue_size = plan.settings.max_waiting
        slots = SlotTable.create(plan.workers, self._columns, queue_size)
        counts = SharedCounts.create(plan.workers)
        pipes = [end for _ in range(plan.workers) for end in os.pipe()]
        wakers = tuple(pipes[1::2])
        for end in pipes:
            os.set_blocking(end, False)
        table = SlotTable(slots, plan.workers, self._columns, queue_size, wakers)
        # They are this process's, so that a connection to a worker that is being restarted waits for it.
        private = [socket.socket(socket.AF_UNIX) for _ in range(plan.workers)]
        try:
            workers = [
                _Worker(
                    plan=replace(
                        plan,
                        index=index,
                        listener=self._listeners[index % len(self._listeners)].fileno(),
                        private=private[index].fileno(),
                        slots=slots,
                        counts=counts,
                        waker=pipes[2 * index],
                        wakers=wakers,
                        folder=folder,
                    )
                )
                for index in range(plan.workers)
            ]
            for worker, listener in zip(workers, private, strict=True):
                listener.bind(worker.plan.private_socket(worker.plan.index))
                listener.listen()
            loop.add_signal_handler(signal.SIGUSR1, self._cordon, workers)
            keepers = [asyncio.create_task(self._keep_running(worker, table)) for worker in workers]
            await asyncio.wait(
                [asyncio.create_task(self._stopping.wait()), *keepers], return_when=asyncio.FIRST_COMPLETED
            )
            self._stopping.set()
            await self._stop_workers(workers, keepers)
            errors = [error for keeper in keepers if (error := keeper.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            for listener in private:
                listener.close()
            for end in (slots, counts, *pipes):
                os.close(end)
            shutil.rmtree(folder, ignore_errors=True)
        return self._status

    def _cordon(self, workers: Sequence[_Worker]) -> None:
        """Have the workers refuse new sessions, as SIGUSR1 does, those that are restarted later included."""
        self._cordoned = True
        for worker in workers:
            worker.signal(signal.SIGUSR1)

    def _on_signal(self, number: int) -> None:
        self._stopping.set()
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._forced.set()

    async def _keep_running(self, worker: _Worker, table: SlotTable) -> None:
        """Start a worker and restart it whenever it dies, until the fleet stops or the worker fails to start."""
        failed_starts = 0
        pause_s = MIN_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            try:
                await self._run_worker(worker)
            except OSError as error:  # no process or file descriptor is available at the moment
                if worker.process is None:  # not even the first start succeeded
                    raise
                logger.error("worker %d could not be started: %s; retrying", worker.plan.index, error)
            else:
                healthy = worker.output == READY
                table.clear(worker.plan.index)
                assert worker.process is not None
                status = worker.process.returncode
                if self._stopping.is_set():
                    return
                failed_starts = 0 if healthy else failed_starts + 1
                if status == FAILED and not healthy:
                    raise ConfigurationError(
                        worker.output.decode(errors="replace") or "a worker could not start"
                    )
                if failed_starts == MAX_FAILED_STARTS:
                    self._status = 1
                    logger.error(
                        "worker %d ended with status %s before it was healthy, %d times; its output above says why",
                        worker.plan.index,
                        status,
                        failed_starts,
                    )
                    return
                if healthy and loop.time() - started > STEADY_UPTIME_S:
                    pause_s = MIN_BACKOFF_S
                logger.warning("worker %d ended with status %s; it is restarted", worker.plan.index, status)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)

    async def _run_worker(self, worker: _Worker) -> None:
        """Run one worker process until it exits."""
        worker.output, plan = b"", worker.plan
        ours, theirs = socket.socketpair()
        # It stays open: end of file tells the worker that this process is gone.
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                process = worker.process = await asyncio.create_subprocess_exec(
                    *module_command("servers.fleet.worker"),
                    stdin=theirs.fileno(),
                    pass_fds=(plan.listener, plan.private, plan.slots, plan.counts, plan.waker, *plan.wakers),
                )
            writer.write(plan.to_json() + b"\n")
            if self._stopping.is_set():  # set while the worker was being started
                worker.signal(signal.SIGTERM)
            reading = asyncio.create_task(self._read_report(worker, reader))
            await process.wait()
            await asyncio.wait([reading], timeout=REPORT_TIMEOUT_S)
            reading.cancel()
        finally:
            writer.close()

    async def _read_report(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            worker.output = await reader.read(65_536)
        if worker.output == READY and self._cordoned:
            worker.signal(signal.SIGUSR1)
        if worker.output == READY and self._on_started is not None:
            on_started, self._on_started = self._on_started, None
            on_started()

    async def _stop_workers(
        self, workers: Sequence[_Worker], keepers: "Sequence[asyncio.Task[None]]"
    ) -> None:
        """Terminate all workers; kill those that still run after the deadline or a second interrupt."""
        for worker in workers:
            worker.signal(signal.SIGTERM)
        forced = asyncio.create_task(self._forced.wait())
        over = asyncio.create_task(asyncio.wait(keepers))
        timeout_s = self._plan.settings.drain_s + KILL_AFTER_DRAIN_S
        await asyncio.wait([forced, over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        for worker in workers:
            worker.signal(signal.SIGKILL)
        await over
