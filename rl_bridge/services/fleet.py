"""The processes of a run: one role each, spawned by Monarch, all gone when the run is."""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from rl_bridge.errors import BridgeError, MissingStack, RoleFailed

# Read by Monarch when it is first imported: how soon a dead process is noticed.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")

try:
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch.actor import default_bootstrap_cmd, this_host
except ModuleNotFoundError as missing:
    raise MissingStack("torchmonarch") from missing

T = TypeVar("T")

STOP_TIMEOUT_S = 20.0
REPORT_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 4096

# A terminal sends Ctrl-C to every process of its foreground group. The controller alone may act on it, so
# that roles are stopped in order; and what a role prints belongs in its log, not between progress lines.
_SHELL = 'trap "" INT; exec "$0" "$@" >>"$ROPEWALK_ROLE_LOG" 2>&1'


class Fleet:
    """Spawns roles, notices their death, and stops them.

    Args:
        logs: Folder for one log file a role.
    """

    _ended: ClassVar[set[str]] = set()
    """Marks of fleets that are over, as in the names of their processes and actors."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._mark = secrets.token_hex(8)
        self._scratch: Path | None = None
        self._procs: list[Any] = []
        self._fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        # vLLM and others leave files where temporary ones go; theirs go together.
        self._scratch = Path(tempfile.mkdtemp(prefix="ropewalk-"))
        monarch.actor.unhandled_fault_hook = self._on_fault
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._ended.add(self._mark)
        for procs in reversed(self._procs):
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await procs.stop()
            except Exception:  # a mesh that lost its process cannot be stopped, and need not be
                continue
        self._procs.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        # The hook stays: a dead role's report may still be on its way, and Monarch's own hook would turn it
        # into a KeyboardInterrupt of whoever runs by then.

    def spawn(
        self, role: str, actor: type[Any], *args: Any, environment: dict[str, str] | None = None
    ) -> Any:
        """Start one process for a role and put one actor into it.

        Args:
            role: Names the process and its log.
            actor: A Monarch actor class.
            args: Of its constructor.
            environment: Variables the process starts with, beside the controller's.

        Returns:
            The actor's mesh; `await mesh.method.call_one(...)`.
        """
        log = self._logs / f"{role}.log"
        # One death makes several reports, also of meshes that Monarch adds; all of them name the process.
        marked = f"{role}_{self._mark}"
        procs = this_host().spawn_procs(
            per_host={marked: 1},
            bootstrap_command=_quiet_command().with_env(
                {
                    "ROPEWALK_ROLE_LOG": str(log.absolute()),
                    "TMPDIR": str(self._scratch),
                    **(environment or {}),
                }
            ),
        )
        self._procs.append(procs)
        return procs.spawn(marked, actor, *args)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` until it ends or a role dies, whichever is first.

        Raises:
            RoleFailed: A process of the fleet died; `work` was cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._fault}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self._fault.done() and isinstance(task.exception(), SupervisionError):
                # The call that was under way has failed already; the report of why is on its way.
                await asyncio.wait({self._fault}, timeout=REPORT_TIMEOUT_S)
            if not task.done() or isinstance(task.exception(), SupervisionError):
                raise self._failed(task)
            return _result(task)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _failed(self, task: "asyncio.Task[Any]") -> RoleFailed:
        tails = "\n".join(self._tail(log) for log in sorted(self._logs.glob("*.log")))
        report = self._fault.result() if self._fault.done() else task.exception()
        return RoleFailed(f"a process of the run died: {report}\n{tails}")

    def _tail(self, log: Path) -> str:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return f"--- {log} ---\n" + "\n".join(lines[-5:])

    def _on_fault(self, failure: Any) -> None:
        """Called by Monarch, on a thread of its own, when nobody else handled a failure."""
        report = str(failure)
        # A report can come late, while the next fleet of this process is at work: it is not that one's.
        # Only what names an ended fleet is dropped, so a report in an unforeseen form still counts.
        if not self._stopping and not any(mark in report for mark in self._ended):
            self._loop.call_soon_threadsafe(self._record, report)

    def _record(self, failure: str) -> None:
        if not self._fault.done():
            self._fault.set_result(failure)


def _result(task: "asyncio.Task[T]") -> T:
    try:
        return task.result()
    except monarch.actor.ActorError as error:
        if isinstance(error.exception, BridgeError):  # ours: the caller knows what to do with it
            raise error.exception from error
        raise


def _quiet_command() -> Any:
    command = default_bootstrap_cmd()
    command.args = ["-c", _SHELL, command.program, *command.args]
    command.program = "/bin/sh"
    return command
