"""The supervisor's side of the zygote, a process that has imported all modules and forks interpreters on request."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.answers import ZYGOTE_ENDED, Exit
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.inside.frames import LOADER_VARIABLES, READY_NOTICE, ROOT_NOTICE, WORKSPACE_NOTICE
from openenv_core.sandbox.kernel.cgroups import Cgroup, CgroupMaker
from openenv_core.sandbox.processes import (
    Connections,
    InterpreterProcesses,
    ProcessTree,
    receive_notice,
)
from openenv_core.sandbox.worker import Worker
from openenv_core.sandbox.workspace import Scratch, Workspace

T = TypeVar("T")

_BOOT: Final = Path(__file__).parent / "inside" / "boot.py"
_MESSAGE_BYTES: Final = 1 << 16
_FULL_CHANNEL_INTERVAL_S: Final = 0.002
BOOT_TIMEOUT_S: Final = 120.0
"""Seconds for the zygote to start and import the modules."""

START_TIMEOUT_S: Final = 20.0
"""Seconds for an interpreter to start."""

SHUTDOWN_TIMEOUT_S: Final = 5.0
_OUTPUT_TAIL_CHARS: Final = 2000

_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "module://ropewalk_figures",
    # Threads that a library starts on import do not survive a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All environment variables that code sees. It must not see the server's, which include secrets."""


class Zygote:
    """A running zygote.

    Args:
        spec: The fields of `ZygoteSpec` (`inside/walls.py`).
        died: Called once, when the zygote has ended.
    """

    def __init__(self, spec: dict[str, Any], died: Callable[[], None]) -> None:
        self._spec = spec
        self._died = died
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._channel, self._inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._exits: dict[int, asyncio.Future[Exit]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the zygote
        self.ended = False

    @property
    def pid(self) -> int | None:
        """Its process id; None before the start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the zygote, and return once it is ready.

        Raises:
            SandboxUnavailableError: It ended, or was not ready in time.
            ConfigurationError: A module to preload cannot be imported.
        """
        try:
            # Short enough for the event loop: the child is started without copying this process.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-I", "-B", str(_BOOT), str(self._inner.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[self._inner.fileno()],
                env={
                    **_ENVIRONMENT,
                    **{name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ},
                },
                cwd="/",
                # Ctrl-C in a terminal must reach only the server, which closes the zygote.
                start_new_session=True,
            )
            self._inner.close()
            self._channel.setblocking(False)
            self._loop.add_reader(self._channel.fileno(), self._readable)
            async with asyncio.timeout(BOOT_TIMEOUT_S):
                await self._send(self._spec, [])
                await asyncio.shield(self._ready)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise SandboxUnavailableError(
                    f"expected interpreters within {BOOT_TIMEOUT_S:g} s, got none; preload less"
                ) from None
            if isinstance(error, OSError):
                raise SandboxUnavailableError(
                    f"expected a process to fork interpreters from, got none: {error}"
                ) from None
            raise

    async def fork_interpreter(
        self,
        limits: Limits,
        uid: int | None,
        *,
        snapshot: bool,
        scratch: Scratch | None,
        cgroups: CgroupMaker | None,
        removed: Callable[[], None],
    ) -> Worker:
        """Fork an interpreter, and wait until it is confined.

        Args:
            limits: The session's limits.
            uid: The interpreter's user; None: the zygote's.
            snapshot: Whether requests run in forks, so that the state before one that is killed remains.
            scratch: Makes workspace folders; None if sessions have their own file systems.
            cgroups: Makes control groups; None if that is not possible.
            removed: Called once the workspace and all its branches are closed and removed.

        Raises:
            SandboxUnavailableError: It was not ready in time, or the zygote is gone.
        """
        owner = None if uid is None else (uid, uid)
        forks, paced = snapshot or limits.allow_subprocess, scratch is None and limits.allow_subprocess
        exited: asyncio.Future[Exit] = self._loop.create_future()
        async with contextlib.AsyncExitStack() as undo:
            path = None
            if scratch is not None:
                folder, path = await _in_thread(partial(scratch.make, owner), _drop_folder)
                place = Workspace(folder, limits, owner, bounded=False, path=path, removed=removed)
                undo.push_async_callback(place.close)
            before = undo.enter_context(contextlib.ExitStack())
            # Before the control group: this may fail for want of descriptors.
            connections = Connections(paced=paced, owner=owner)
            before.callback(connections.close)
            # Resource limits bound one process; only a control group bounds it and its children together.
            cgroup, doors = None, list[int]()
            if cgroups is not None and forks:
                cgroup, doors = await _in_thread(partial(_make_cgroup, cgroups, limits), _drop_cgroup)
            tree = ProcessTree(exited, cgroup, owner, connections.pacer)
            undo.push_async_callback(tree.close)
            # On failure the connections are closed first, which ends a process whose id is not known yet.
            undo.enter_context(before.pop_all())
            spec = {
                "limits": asdict(limits),
                "uid": uid,
                "workdir": path,
                "snapshot": snapshot,
                "paced": paced,
            }
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    try:
                        await self._fork(spec, [*connections.inner, *doors], exited)
                    finally:
                        connections.close_remote_ends()
                        for door in doors:
                            os.close(door)
                    root, _ = await receive_notice(connections.control, exited, ROOT_NOTICE)
                    tree.root = os.pidfd_open(root)
                    if path is None:
                        _, (folder,) = await receive_notice(connections.control, exited, WORKSPACE_NOTICE)
                        place = Workspace(folder, limits, owner, bounded=True, removed=removed)
                        undo.push_async_callback(place.close)
                    elif forks:
                        tree.group = root
                    process, _ = await receive_notice(connections.control, exited, READY_NOTICE)
                processes = InterpreterProcesses(tree, process, forks=snapshot)
                tree.waits = root != process
                # Otherwise orphans are the zygote's children.
                tree.first = root if tree.waits or not forks else None
            except TimeoutError:
                raise SandboxUnavailableError(
                    f"expected an interpreter within {START_TIMEOUT_S:g} s, got none; the machine may be overloaded"
                ) from None
            except ProcessLookupError:
                await asyncio.wait([exited], timeout=1.0)
                if exited.done() and exited.result().zygote:
                    raise SandboxUnavailableError(ZYGOTE_ENDED) from None
                stderr = connections.read_stderr() or "it wrote nothing"
                raise SandboxUnavailableError(f"expected an interpreter, got none: {stderr}") from None
            if forks and not paced:
                tree.leader = process
            if not snapshot:
                connections.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            undo.pop_all()
        return Worker(connections, limits, processes, place)

    async def _fork(self, spec: dict[str, Any], descriptors: list[int], exited: asyncio.Future[Exit]) -> None:
        number = next(self._numbers)
        try:
            if self.ended:
                raise BrokenPipeError
            self._exits[number] = exited
            await self._send({"fork": number, "spec": spec}, descriptors)
        except BaseException as error:
            self._exits.pop(number, None)
            if not exited.done():
                exited.set_result(Exit(zygote=True))
            if isinstance(error, OSError):
                raise SandboxUnavailableError("the zygote has ended") from None
            raise

    async def close(self) -> None:
        """End the zygote and all its interpreters. Idempotent."""
        self._on_end()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.to_thread(self._process.wait, SHUTDOWN_TIMEOUT_S)
        self._inner.close()
        self._log.close()

    def output_tail(self) -> str:
        """Return the last part of the zygote's own output."""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), _OUTPUT_TAIL_CHARS, max(0, size - _OUTPUT_TAIL_CHARS))
        return data.decode("utf-8", "replace").strip()

    async def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        data = json.dumps(message).encode()
        while True:
            try:
                socket.send_fds(self._channel, [data], descriptors)
                return
            except BlockingIOError:  # dozens of forks at once; the zygote needs milliseconds for each
                await asyncio.sleep(_FULL_CHANNEL_INTERVAL_S)

    def _readable(self) -> None:
        while True:
            try:
                data = self._channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_end()
                return
            message = json.loads(data)
            if "exit" in message:
                exit_ = self._exits.pop(message["exit"], None)
                if exit_ is not None and not exit_.done():
                    exit_.set_result(Exit(message["code"], message["signal"]))
            elif "ready" in message:
                self._ready.set_result(None)
            elif not self._ready.done():
                kind = ConfigurationError if message["is_configuration"] else SandboxUnavailableError
                self._ready.set_exception(kind(message["error"]))

    def _on_end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if not self._ready.done():
            output = self.output_tail()
            self._ready.set_exception(
                SandboxUnavailableError(
                    f"expected a zygote, got one that ended at once{': ' if output else ''}{output}"
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
    # Its channel is closed, but it may still be alive: close() kills it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SHUTDOWN_TIMEOUT_S)


async def _in_thread(make: Callable[[], T], drop: Callable[[T], None]) -> T:
    """Return the result of `make`, run in a thread; if the caller is cancelled meanwhile, pass it to `drop`."""
    make_task = asyncio.ensure_future(asyncio.to_thread(make))

    def drop_result(_: object) -> None:
        if not make_task.cancelled() and make_task.exception() is None:
            drop(make_task.result())

    try:
        return await asyncio.shield(make_task)
    except asyncio.CancelledError:
        make_task.add_done_callback(drop_result)
        raise


def _drop_folder(pair: tuple[int, str]) -> None:
    folder, path = pair
    os.close(folder)
    with contextlib.suppress(OSError):  # the folder of all sessions may be gone already
        os.rmdir(path)


def _drop_cgroup(pair: tuple[Cgroup, list[int]]) -> None:
    cgroup, doors = pair
    for door in doors:
        os.close(door)
    cgroup.remove()


def _make_cgroup(maker: CgroupMaker, limits: Limits) -> tuple[Cgroup, list[int]]:
    # The files of the session's tmpfs count as memory too, and its supervising process counts as a process.
    try:
        cgroup = maker.make("session", limits.memory_bytes + limits.disk_bytes, limits.processes + 2)
        try:
            return cgroup, cgroup.open_join_files()
        except OSError:
            cgroup.remove()
            raise
    except OSError as error:
        raise SandboxUnavailableError(f"expected a control group for the interpreter: {error}") from None
