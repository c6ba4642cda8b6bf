"""What a process of a run knows of itself: its start and seed, its turn on a GPU, its main loop, its end."""

import asyncio
import atexit
import errno
import hashlib
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from rl_bridge.errors import RoleError

START_VARIABLE = "ROPEWALK_START"
"""The variable that tells a process which start of which replica it belongs to; see `start_of`."""
FIRST_START = "0.0.0"
_SEED_BITS = 31  # every random number generator takes as many


def start_of(replica: int, rank: int, earlier_starts: int) -> str:
    """Return the value of `START_VARIABLE`: replica, rank, and the number of earlier starts."""
    return f"{replica}.{rank}.{earlier_starts}"


def shared_gpu_number() -> int:
    """Return the number that a trainer's rank shares with the generator with which it takes turns."""
    replica, rank, _ = os.environ.get(START_VARIABLE, FIRST_START).split(".")
    return int(replica) + int(rank)


RUN_VARIABLE = "ROPEWALK_RUN"
"""The variable that tells a process which run it belongs to: the fleet's name."""
GPU_LOCK_POLL_INTERVAL_S = 0.02


class GpuLock:
    """A lock on this process's GPU, for processes that take turns on it.

    It is held by binding an abstract Unix socket (unix(7)), which exists on this machine only and in no folder: the
    kernel releases it when its holder dies. Without GPUs, rank N of one service takes turns with replica N of the
    other, as if they shared a GPU.
    """

    def __init__(self) -> None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or f"cpu-{shared_gpu_number()}"
        run = os.environ.get(RUN_VARIABLE, "")
        self._names = [f"\0ropewalk-turn/{run}/{device.strip()}" for device in devices.split(",")]
        self._sockets: list[socket.socket] = []
        self._acquiring = asyncio.Lock()
        self.held = False

    async def acquire(self, timeout_s: float) -> None:
        """Wait for the lock; returns at once if this process holds it."""
        async with self._acquiring:
            if not self.held:
                await self._acquire(timeout_s)

    async def _acquire(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._try_bind_all():  # noqa: ASYNC110 - the kernel tells nobody
                    await asyncio.sleep(GPU_LOCK_POLL_INTERVAL_S)
        except TimeoutError:
            raise RoleError(
                f"expected a turn on the GPU that trainer and generators share (monarch.colocate) within "
                f"{timeout_s:g} s, another process has it; see its log, or raise trainer.timeout_s"
            ) from None

    def _try_bind_all(self) -> bool:
        """Bind all names or none: the trainer's ranks have a GPU each, and the first to have it waits for the rest."""
        try:
            for name in self._names:
                self._sockets.append(socket.socket(socket.AF_UNIX))
                if not _try_bind(self._sockets[-1], name):
                    return False
            self.held = True
        finally:
            if not self.held:
                self.release()
        return True

    def release(self) -> None:
        """Release the lock."""
        sockets, self._sockets, self.held = self._sockets, [], False
        for sock in sockets:
            sock.close()


def _try_bind(sock: socket.socket, name: str) -> bool:
    try:
        sock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def derive_seed(seed: int) -> int:
    """Derive this process's own seed from the run's.

    Replicas with the same seed would sample the same answers for siblings, which share a prompt and are spread over
    replicas; and a restarted replica would repeat its earlier samples. The first start of the first rank of replica 0
    and processes outside of services keep the run's seed.
    """
    start = os.environ.get(START_VARIABLE, FIRST_START)
    if start == FIRST_START:
        return seed
    digest = hashlib.sha256(f"{seed}/{start}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)


PROGRAM = "from rl_bridge.services import own_process; own_process.run_module()"
"""What is put in front of Monarch's program of a process, so that its main loop is known when an actor asks."""

_loop: asyncio.AbstractEventLoop | None = None


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        global _loop
        loop = super().new_event_loop()
        if threading.current_thread() is threading.main_thread():
            _loop = loop
        return loop


def run_module() -> None:
    """Run the module that the command line names after `-m`, as Python does, and record its main thread's loop."""
    asyncio.set_event_loop_policy(_Policy())
    del sys.argv[1]  # -m
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop of the main thread, which alone may handle signals; actors run on another thread's.

    None if this process was not started with `PROGRAM`.
    """
    return _loop


FLUSH_TIMEOUT_S = 0.3
"""Time for Monarch's last messages, the same as Monarch's own."""

SHUTDOWN_TIMEOUT_S = 5.0
"""Time for the rest of the shutdown: on a busy machine Monarch's own second is too short."""


@cache
def shut_down_at_exit() -> None:
    """Shut down Monarch's client at exit, before Monarch does, which prints a traceback if that takes too long.

    Call it when there is a client: exit handlers run in reverse order of registration.
    """
    atexit.register(_shut_down)


def _shut_down() -> None:
    from monarch.actor import shutdown_context

    with suppress(Exception):  # the process is exiting
        shutdown_context(host_timeout=FLUSH_TIMEOUT_S).get(timeout=SHUTDOWN_TIMEOUT_S)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt within the block.

    For calls that block the event loop, which handles a signal only in its next iteration. On another thread than the
    main one, which alone receives signals, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            # None means a handler that was not installed by Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
