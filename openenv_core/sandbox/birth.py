"""How a session's process comes to life: its descriptors, its folder, and the words with which it reports."""

import array
import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import asdict
from typing import Any, Final

from openenv_core.sandbox.errors import SandboxUnavailable
from openenv_core.sandbox.kernel.identity import session_uid
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.scratch import Scratch
from openenv_core.sandbox.worker import Worker
from openenv_core.sandbox.workspace import Workspace
from openenv_core.sandbox.zygote import Zygote

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 4)

ROOT: Final = b"R"
"""Sent by the process whose end is the end of all, with a descriptor of the workspace where that is not ours."""

READY: Final = b"I"
"""Sent by the interpreter, once nothing is left to be taken from it."""


class Birth:
    """Brings forth processes.

    Args:
        zygote: Forks them.
        scratch: Where folders are made; None where sessions have a file system of their own.
        limits: Of the session.
    """

    def __init__(
        self,
        zygote: Zygote,
        scratch: Scratch | None,
        limits: Limits,
    ) -> None:
        self._zygote = zygote
        self._scratch = scratch
        self._limits = limits

    async def bear(
        self, number: int, slot: int, timeout_s: float, *, snapshot: bool
    ) -> tuple[Worker, Workspace]:
        """Have a process forked, and wait until it is confined.

        Args:
            number: Names it; never used twice with one zygote.
            slot: Decides its user, where it can have one of its own.
            timeout_s: Seconds until it has to be ready.
            snapshot: Keeps the state of before an execution that had to be killed.

        Raises:
            SandboxUnavailable: It was not.
        """
        uid = session_uid(slot)
        owner = None if uid is None else (uid, uid)
        async with contextlib.AsyncExitStack() as undo:
            folder, path = -1, None
            if self._scratch is not None:
                folder, path = await asyncio.to_thread(self._scratch.make, str(number), owner)
                place = Workspace(folder, self._limits, owner, bounded=False, name=str(path))
                undo.push_async_callback(place.close)
            worker = await self._fork(number, owner, None if path is None else str(path), snapshot=snapshot)
            undo.push_async_callback(worker.close)
            try:
                async with asyncio.timeout(timeout_s):
                    root, folders = await _hear(worker, ROOT)
                    worker.root = root
                    if path is None:
                        (folder,) = folders
                        place = Workspace(folder, self._limits, owner, bounded=True)
                        undo.push_async_callback(place.close)
                    process, _ = await _hear(worker, READY)
            except TimeoutError:
                raise SandboxUnavailable(
                    f"expected an interpreter within {timeout_s:g} s, got none; the machine may be overloaded"
                ) from None
            worker.watch(process)
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
        control, inner = socket.socketpair()
        control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        control.setblocking(False)
        stdout, inner_stdout = os.pipe2(os.O_CLOEXEC)
        stderr, inner_stderr = os.pipe2(os.O_CLOEXEC)
        worker = Worker(control, stdout, stderr, self._limits)
        try:
            worker.exited = await self._zygote.fork(
                number, {"spec": spec}, [inner.fileno(), inner_stdout, inner_stderr]
            )
        except BaseException:
            worker.release()
            raise
        finally:
            inner.close()
            os.close(inner_stdout)
            os.close(inner_stderr)
        return worker


async def _hear(worker: Worker, expected: bytes) -> tuple[int, list[int]]:
    """Wait for one word; return a descriptor of the process that said it, and the descriptors that came with it."""
    await _readable(worker)
    try:
        # One byte at a time: the words of two processes must not come as one.
        word, ancillary, _, _ = worker.control.recvmsg(1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        word, ancillary = b"", []
    process, descriptors = 0, array.array("i")
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data)
        elif kind == socket.SCM_CREDENTIALS:
            # The kernel has translated the number into one of this process's own name space.
            process, _, _ = _CREDENTIALS.unpack(data)
    if word == expected:
        return os.pidfd_open(process), list(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    await asyncio.wait([worker.exited], timeout=1.0)
    if worker.exited.done() and worker.exited.result().zygote:
        raise SandboxUnavailable("the process that interpreters are forked from has ended")
    raise SandboxUnavailable(f"expected an interpreter, got none: {worker.words() or 'it said nothing'}")


async def _readable(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[Any] = loop.create_future()
    loop.add_reader(worker.control.fileno(), _set, readable)
    try:
        await asyncio.wait((readable, worker.exited), return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(worker.control.fileno())


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
