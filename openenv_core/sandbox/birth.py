"""How a session's process comes to life: its descriptors, its folder, and the words with which it reports."""

import asyncio
import contextlib
import os
import socket
from dataclasses import asdict

from openenv_core.sandbox.errors import SandboxUnavailable
from openenv_core.sandbox.inside.frames import PLACE, READY, ROOT
from openenv_core.sandbox.kernel.cgroups import Cgroup, CgroupMaker
from openenv_core.sandbox.kernel.identity import session_uid
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.scratch import Scratch
from openenv_core.sandbox.snapshots import BranchingWorker
from openenv_core.sandbox.wires import hear, make_ends
from openenv_core.sandbox.worker import Worker
from openenv_core.sandbox.workspace import Workspace
from openenv_core.sandbox.zygote import Zygote


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
                raise SandboxUnavailable(
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
            raise SandboxUnavailable(
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


async def _stillborn(worker: Worker) -> SandboxUnavailable:
    await asyncio.wait([worker.exited], timeout=1.0)
    if worker.exited.done() and worker.exited.result().zygote:
        return SandboxUnavailable("the process that interpreters are forked from has ended")
    return SandboxUnavailable(f"expected an interpreter, got none: {worker.words() or 'it said nothing'}")
