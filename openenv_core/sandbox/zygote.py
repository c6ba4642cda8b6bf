"""The zygote seen from outside: a process that has imported everything, and forks interpreters when asked."""

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.inside.frames import PLACE, READY, ROOT
from openenv_core.sandbox.inside.standing import FOR_THE_LOADER
from openenv_core.sandbox.kernel.cgroups import Cgroup, CgroupMaker
from openenv_core.sandbox.kernel.identity import session_uid
from openenv_core.sandbox.scratch import Scratch
from openenv_core.sandbox.snapshots import BranchingWorker
from openenv_core.sandbox.worker import Exit, Worker, hear, make_ends
from openenv_core.sandbox.workspace import Workspace

BOOT: Final = Path(__file__).parent / "inside" / "boot.py"
MESSAGE_BYTES: Final = 1 << 16
SHUTDOWN_TIMEOUT_S: Final = 5.0
SAID_CHARS: Final = 2000

ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "module://ropewalk_figures",
    # A library that starts threads when it is imported would have none of them after a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All that code sees of the environment; the server's own variables, its secrets among them, stay with it."""


class Zygote:
    """A running zygote.

    Args:
        told: What it is told: `inside/zygote.py` says what that is.
        died: Called once when it is gone.
    """

    def __init__(self, told: dict[str, Any], died: Callable[[], None]) -> None:
        self._told = told
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._channel, self._inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._exits: dict[int, asyncio.Future[Exit]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the zygote
        self.gone = False

    @property
    def pid(self) -> int | None:
        """Of its process; None before the start."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> dict[str, Any]:
        """Start it, and return what it says of itself once it is ready.

        Raises:
            SandboxUnavailableError: It ended, or was not ready in time.
            ConfigurationError: A module cannot be imported.
        """
        try:
            # Short enough for the loop: the child is made without copying this process.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-I", "-B", str(BOOT), str(self._inner.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[self._inner.fileno()],
                env={
                    **ENVIRONMENT,
                    **{name: os.environ[name] for name in FOR_THE_LOADER if name in os.environ},
                },
                cwd="/",
                # A terminal's Ctrl-C is for the server, which ends the zygote in order.
                start_new_session=True,
            )
        finally:
            self._inner.close()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._readable)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"tell": self._told}, [])
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise SandboxUnavailableError(
                f"expected interpreters within {timeout_s:g} s, got none; raise boot_timeout_s, or preload less"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def fork(self, number: int, spec: dict[str, Any], descriptors: list[int]) -> asyncio.Future[Exit]:
        """Ask for an interpreter.

        Args:
            number: Names it in what the zygote tells; never used twice.
            spec: What it is told.
            descriptors: The inner ends of its control socket, its stdout and its stderr.

        Returns:
            A future of its exit.

        Raises:
            SandboxUnavailableError: The zygote is gone.
        """
        if self.gone:
            raise SandboxUnavailableError("expected a running zygote, got one that has ended")
        exit_ = self._loop.create_future()
        self._exits[number] = exit_
        try:
            await self._send({"fork": number, **spec}, descriptors)
        except OSError:
            self._exits.pop(number, None)
            raise SandboxUnavailableError("expected a running zygote, got one that has ended") from None
        return exit_

    async def close(self) -> None:
        """End it, and all interpreters with it. Idempotent."""
        if self._process is None:
            self._channel.close()
            self._log.close()
            return
        self._gone()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.to_thread(self._process.wait, SHUTDOWN_TIMEOUT_S)
        if not self._log.closed:
            self._log.close()

    def said(self) -> str:
        """Return the last words of the zygote on its own streams."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), SAID_CHARS, max(0, size - SAID_CHARS))
        return data.decode("utf-8", "replace").strip()

    async def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        data = json.dumps(message).encode()
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        while True:
            try:
                self._channel.sendmsg([data], rights)
                return
            except BlockingIOError:
                writable = self._loop.create_future()
                self._loop.add_writer(self._channel.fileno(), _set, writable)
                try:
                    await writable
                finally:
                    if not self.gone:
                        self._loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        while True:
            try:
                data = self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._gone()
                return
            message = json.loads(data)
            if "exit" in message:
                exit_ = self._exits.pop(message["exit"], None)
                if exit_ is not None and not exit_.done():
                    exit_.set_result(Exit(message["code"], message["signal"]))
            elif "ready" in message:
                self._ready.set_result(message["ready"])
            elif not self._ready.done():
                self._ready.set_exception(_refusal(message))

    def _gone(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        if not self._ready.done():
            said = self.said()
            self._ready.set_exception(
                SandboxUnavailableError(
                    f"expected a zygote, got one that ended at once{': ' if said else ''}{said}"
                )
            )
        self._ready.exception()
        for exit_ in self._exits.values():
            if not exit_.done():
                exit_.set_result(Exit(zygote=True))
        self._exits.clear()
        if self._process is not None:
            self._loop.run_in_executor(None, _reap, self._process)
        self._died()


def _reap(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(
        subprocess.TimeoutExpired
    ):  # its channel is closed, but it lives; close() kills it
        process.wait(SHUTDOWN_TIMEOUT_S)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _refusal(message: dict[str, str]) -> Exception:
    if "unimportable" in message:
        return ConfigurationError(
            f"expected modules that can be imported before interpreters are forked, got {message['unimportable']}; "
            "install it beside this Python, or leave it out"
        )
    return SandboxUnavailableError(message["refused"])


class Birth:
    """Brings forth processes.

    Args:
        zygote: Forks them.
        scratch: Where folders are made; None where sessions have a file system of their own.
        cgroups: Makes control groups; None where there can be none.
        limits: Of the session.
    """

    def __init__(
        self, zygote: Zygote, scratch: Scratch | None, cgroups: CgroupMaker | None, limits: Limits
    ) -> None:
        self._zygote = zygote
        self._scratch = scratch
        self._cgroups = cgroups
        self._limits = limits

    async def fork_interpreter(
        self, number: int, slot: int, timeout_s: float, *, snapshot: bool
    ) -> tuple[Worker, Workspace]:
        """Have a process forked, and wait until it is confined.

        Args:
            number: Names it; never used twice with one zygote.
            slot: Decides its user, where it can have one of its own.
            timeout_s: Seconds until it has to be ready.
            snapshot: Keeps the state of before an execution that had to be killed.

        Raises:
            SandboxUnavailableError: It was not.
        """
        uid = session_uid(slot)
        owner = None if uid is None else (uid, uid)
        async with contextlib.AsyncExitStack() as undo:
            folder, path = -1, None
            if self._scratch is not None:
                folder, path = await asyncio.to_thread(self._scratch.make, str(number), owner)
                place = Workspace(
                    folder, self._limits, owner, bounded=False, name=str(path), inside=str(path)
                )
                undo.push_async_callback(place.close)
            worker = await self._fork(number, owner, None if path is None else str(path), snapshot=snapshot)
            undo.push_async_callback(worker.close)
            try:
                async with asyncio.timeout(timeout_s):
                    root, _ = await _hear(worker, ROOT)
                    worker.root = await _opened(worker, root)
                    if path is None:
                        _, (folder,) = await _hear(worker, PLACE)
                        place = Workspace(folder, self._limits, owner, bounded=True)
                        undo.push_async_callback(place.close)
                    elif snapshot or self._limits.allow_subprocess:
                        worker.group = root
                    process, _ = await _hear(worker, READY)
            except TimeoutError:
                raise SandboxUnavailableError(
                    f"expected an interpreter within {timeout_s:g} s, got none; the machine may be overloaded"
                ) from None
            if self._limits.allow_subprocess or snapshot:
                worker.leader = process
            if isinstance(worker, BranchingWorker):
                worker.watch_head(process)
            else:
                worker.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
                worker.watch(await _opened(worker, process))
            undo.pop_all()
        return worker, place

    async def _fork(
        self, number: int, owner: tuple[int, int] | None, path: str | None, *, snapshot: bool
    ) -> Worker:
        spec = {
            "limits": asdict(self._limits),
            "uid": owner and owner[0],
            "workdir": path,
            "snapshot": snapshot,
        }
        ends = make_ends()
        worker = (
            BranchingWorker(ends, self._limits)
            if snapshot
            else Worker(ends.control, ends.stdout, ends.stderr, self._limits)
        )
        doors: list[int] = []
        try:
            # What one process may have is bounded without; what it and its children have together is not.
            if self._cgroups is not None and (snapshot or self._limits.allow_subprocess):
                worker.cgroup = await asyncio.to_thread(self._make_cgroup, number)
                doors = worker.cgroup.open_doors()
            worker.follow(await self._zygote.fork(number, {"spec": spec}, [*ends.inner, *doors]))
        except OSError as error:
            worker.release()
            raise SandboxUnavailableError(
                f"expected a control group for the interpreter, got none: {error}"
            ) from None
        except BaseException:
            worker.release()
            raise
        finally:
            ends.hand_over()
            for door in doors:
                os.close(door)
        return worker

    def _make_cgroup(self, number: int) -> Cgroup:
        assert self._cgroups is not None
        limits = self._limits
        # The files of its own file system count as memory too; and what watches over it is a process.
        return self._cgroups.make(str(number), limits.memory_bytes + limits.disk_bytes, limits.processes + 2)


async def _hear(worker: Worker, expected: bytes) -> tuple[int, list[int]]:
    heard = await hear(worker.control, worker.exited, expected)
    if heard is not None:
        return heard
    raise await _stillborn(worker)


async def _opened(worker: Worker, process: int) -> int:
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        raise await _stillborn(worker) from None


async def _stillborn(worker: Worker) -> SandboxUnavailableError:
    await asyncio.wait([worker.exited], timeout=1.0)
    if worker.exited.done() and worker.exited.result().zygote:
        return SandboxUnavailableError("the process that interpreters are forked from has ended")
    return SandboxUnavailableError(
        f"expected an interpreter, got none: {worker.words() or 'it said nothing'}"
    )
