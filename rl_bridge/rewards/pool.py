"""A pool of processes that evaluate reward functions, with time limits and without leftovers."""

import asyncio
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from openenv_core.backoff import exponential_pause_s
from openenv_core.guard import guard_command
from openenv_core.packages import module_command
from rl_bridge.config.sections import RewardConfig
from rl_bridge.errors import RewardError
from rl_bridge.rewards._worker import LENGTH, STARTED, RewardReply

REAP_TIMEOUT_S = 10.0
"""How long a guard may take to end its worker."""


class RewardWorker:
    """A process that evaluates one response at a time, and the guard that ends it with everything it started.

    Made by `start`.
    """

    def __init__(
        self, guard: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._guard = guard
        self._reader = reader
        self._writer = writer
        self.pid = 0
        """The id of the process that calls the functions."""

    @classmethod
    async def start(cls, functions: Sequence[str], *, timeout_s: float) -> Self:
        """Start a process and wait until it has imported its functions.

        Raises:
            RewardError: An import failed, or the process ended or took too long.
            OSError: The system cannot start another process.
        """
        guard, connection = _spawn(functions)
        self = cls(guard, *await asyncio.open_connection(sock=connection))
        try:
            async with asyncio.timeout(timeout_s):
                reply = RewardReply.decode(await self._read_frame())
            if reply.error:
                raise RewardError(reply.error)
        except BaseException as error:
            await self.kill()
            names = ", ".join(functions)
            if isinstance(error, TimeoutError):
                raise RewardError(
                    f"expected {names} to be imported within {timeout_s:g} s, it is not done; "
                    "raise reward.start_timeout_seconds, or see what the import waits for"
                ) from error
            if isinstance(error, ConnectionError):
                raise RewardError(
                    f"expected {names} to be imported, but the process ended during the import; its output tells why"
                ) from error
            raise
        self.pid = reply.pid
        return self

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._reader.at_eof() or self._guard.poll() is not None

    async def request(self, content: bytes, timeout_s: float) -> RewardReply:
        """Have one request evaluated.

        Raises:
            TimeoutError: It took too long. The process is still running it.
            BrokenPipeError: The process ended before the evaluation began.
            ConnectionError: The process ended during the evaluation.
        """
        evaluating = asyncio.ensure_future(self._evaluate(content))
        try:
            await asyncio.wait({evaluating}, timeout=timeout_s)
            # A reply that has come counts, even if this process was suspended until after the deadline.
            if not evaluating.done():
                raise TimeoutError
            return evaluating.result()
        finally:
            evaluating.cancel()

    async def _evaluate(self, content: bytes) -> RewardReply:
        started = False
        try:
            self._writer.write(LENGTH.pack(len(content)) + content)
            await self._writer.drain()
            started = await self._read_frame() == STARTED
            return RewardReply.decode(await self._read_frame())
        except ConnectionError as error:
            if started:
                raise
            raise BrokenPipeError("the worker's process had ended before it began") from error

    async def kill(self) -> None:
        """End the process and everything that it started."""
        self._writer.transport.abort()
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.close()
        await asyncio.shield(asyncio.to_thread(self._reap))

    def _reap(self) -> None:
        try:
            self._guard.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode < 0 and self.pid:
            # The guard was killed. The kernel kills the worker with it, but not what the worker started.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _read_frame(self) -> bytes:
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the worker's process has ended") from error


def _spawn(functions: Sequence[str]) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        fd = child_socket.fileno()
        worker = (*module_command("rl_bridge.rewards._worker"), str(fd), *functions)
        try:
            guard = subprocess.Popen(
                guard_command(worker, grace_s=0.0, inherited_fd=fd, everything=True),
                stdin=subprocess.PIPE,
                pass_fds=(fd,),
                start_new_session=True,
            )
        except BaseException:
            parent_socket.close()
            raise
    return guard, parent_socket


logger = logging.getLogger(__name__)

MAX_LOST = 2
"""Processes that may end during one evaluation: that of the first try, and that of the retry."""
MAX_ATTEMPTS = 16
"""Attempts per evaluation, including those that found their process already ended."""
START_ATTEMPTS = 3
"""Attempts to start a worker whose functions can no longer be imported."""
SPAWN_ATTEMPTS = 8
"""Attempts to start a worker if the system is out of processes: a minute of that must not end a run of days."""
BACKOFF_S = 0.5
"""The wait after the first failed start of a worker; doubles with each further one."""
MAX_BACKOFF_S = 60.0


class RewardPool:
    """Evaluates responses in a fixed number of processes.

    A function that takes too long is killed with every process that it started, and so is one whose caller is
    cancelled. If something else kills the process, the evaluation is retried once in another. It is also retried once
    if the function raises; a second exception is the function's fault.

    Each of these makes the evaluation None, counted by its reason, except that a function that raises ends the run
    unless `drop_failures` is set, as all of its rewards are probably wrong.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self._workers: set[RewardWorker] = set()
        self._idle: deque[RewardWorker] = deque()
        self._waiters: deque[asyncio.Future[RewardWorker]] = deque()
        self._renewals: set[asyncio.Task[None]] = set()
        self._broken = ""
        self.counts = Counter[str]()
        """Outcomes of evaluations: scored, unscored, timed_out, raised (twice), lost (twice); and retried attempts,
        workers_started and workers_lost."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that call the functions."""
        return [worker.pid for worker in self._workers]

    def check(self) -> None:
        """Raise RewardError if the pool was closed, or can start no more processes."""
        if self._broken:
            raise RewardError(self._broken)

    async def __aenter__(self) -> Self:
        """Start the processes; RewardError if the functions cannot be imported, or are not functions."""
        try:
            starts = (self._add_worker() for _ in range(self._reward.workers))
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def evaluate(self, *, prompt: Any, response: Any, target: Any, function: int = 0) -> float | None:
        """Have a function, given by its index, evaluate a response. All arguments must be picklable.

        Returns:
            The reward; None if there is none, with its reason in `counts`.

        Raises:
            RewardError: The function raised, or did not return a reward; or the pool was closed, or can start no more
                processes.
        """
        content = pickle.dumps((function, prompt, response, target))
        lost = raised = 0
        for _ in range(MAX_ATTEMPTS):
            worker = await self._acquire_worker()
            try:
                reply = await worker.request(content, self._reward.timeout_seconds)
            except ConnectionError as error:
                self._start_renewal(worker)
                self.counts["workers_lost"] += 1
                lost += not isinstance(error, BrokenPipeError)  # if it had not begun, it cannot be the cause
                if lost == MAX_LOST:
                    break
            except TimeoutError:
                self._start_renewal(worker)
                self.counts["timed_out"] += 1
                return None
            except BaseException:  # cancelled: do not let the evaluation run on
                self._start_renewal(worker)
                raise
            else:
                self._release_worker(worker)
                if not reply.error:
                    if reply.reward is None:
                        self.counts["unscored"] += 1
                    else:
                        self.counts["scored"] += 1
                    return reply.reward
                raised += 1
                if raised > 1:
                    self._drop_or_raise(reply.error)
                    return None
            self.counts["retried"] += 1
        self.counts["lost"] += 1
        return None

    async def close(self) -> None:
        """End every process. Pending evaluations raise RewardError."""
        self._mark_broken("expected an open pool of reward functions, got one that was closed")
        for renewal in self._renewals:
            renewal.cancel()
        await asyncio.gather(*self._renewals, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()
        self._idle.clear()

    def _drop_or_raise(self, error: str) -> None:
        self.counts["raised"] += 1
        message = (
            f"expected a reward, but {error.rstrip()}\n"
            "fix the function, have it return None if it cannot tell, or set reward.drop_failures"
        )
        if not self._reward.drop_failures:
            raise RewardError(message)
        logger.warning("a response is left out: %s", message)

    async def _acquire_worker(self) -> RewardWorker:
        """Return a worker for exclusive use until it is released."""
        self.check()
        while self._idle:
            worker = self._idle.popleft()
            if not worker.has_ended:
                return worker
            self.counts["workers_lost"] += 1
            self._start_renewal(worker)
        waiter: asyncio.Future[RewardWorker] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release_worker(waiter.result())
            raise

    def _release_worker(self, worker: RewardWorker) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    def _start_renewal(self, worker: RewardWorker) -> None:
        """Replace a worker in the background."""
        renewal = asyncio.create_task(self._replace(worker))
        self._renewals.add(renewal)
        renewal.add_done_callback(self._on_renewed)

    async def _replace(self, worker: RewardWorker) -> None:
        await worker.kill()
        self._workers.discard(worker)
        for attempt in itertools.count(1):
            if self._broken:
                return
            try:
                await self._add_worker()
                return
            except (RewardError, OSError) as error:
                if attempt >= (SPAWN_ATTEMPTS if isinstance(error, OSError) else START_ATTEMPTS):
                    raise
            await asyncio.sleep(exponential_pause_s(attempt, BACKOFF_S, MAX_BACKOFF_S))

    async def _add_worker(self) -> None:
        reward = self._reward
        worker = await RewardWorker.start(reward.functions, timeout_s=reward.start_timeout_seconds)
        self.counts["workers_started"] += 1
        self._workers.add(worker)
        self._release_worker(worker)

    def _on_renewed(self, renewal: "asyncio.Task[None]") -> None:
        self._renewals.discard(renewal)
        if not renewal.cancelled() and (error := renewal.exception()) is not None:
            self._mark_broken(f"expected another process for reward functions, got: {error}")

    def _mark_broken(self, reason: str) -> None:
        self._broken = self._broken or reason
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(RewardError(self._broken))
