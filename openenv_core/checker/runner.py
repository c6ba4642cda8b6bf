"""Runs checks in worker processes, one after the other, and survives crashes and hangs."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Final

from pydantic import BaseModel

from openenv_core.checker.check import Check
from openenv_core.checker.results import Result, Status, result_of
from openenv_core.checker.subject import CheckLimits
from openenv_core.guard import guard_command
from openenv_core.packages import module_command
from openenv_core.targets import Target

START_TIMEOUT_S: Final = 60.0
"""Seconds for a worker to import its modules."""

DEADLINE_MARGIN_S: Final = 15.0
"""Seconds after a check's own deadline, which a thread cannot enforce on code that never releases the GIL."""

SHUTDOWN_TIMEOUT_S: Final = 60.0
"""Seconds for a worker to stop its servers at the end."""

CLEANUP_TIMEOUT_S: Final = 20.0
"""Seconds for a worker to stop its servers once it is to end."""

JOB_FILE: Final = "job.json"

_TAIL_CHARS: Final = 2000
_DUMPED_LINES: Final = 20

_CHANGE: Final = (
    "do not end or crash the process: no os._exit, no abort, no library that crashes; run code that may crash in a "
    "separate process"
)


class Job(BaseModel):
    """A worker's task, in its file."""

    target: Target
    limits: CheckLimits
    token: str | None
    checks: list[str]


def run_isolated(
    target: Target,
    limits: CheckLimits,
    checks: Sequence[Check],
    *,
    token: str | None = None,
    on_start: Callable[[Check], None] = lambda _: None,
    on_result: Callable[[Result], None] = lambda _: None,
) -> None:
    """Run checks on a target in a worker process; start another one whenever it has ended.

    Args:
        target: The target.
        limits: Limits of the checks.
        checks: The checks, in order.
        token: Bearer token for the server, if it requires one.
        on_start: Called with each check before it runs.
        on_result: Called with each result.
    """
    remaining = list(checks)
    while remaining:
        with _run_worker(target, limits, token, remaining) as worker:
            while remaining and not worker.ended:
                check = remaining.pop(0)
                on_start(check)
                on_result(worker.result(check))


@dataclass
class _Worker:
    _guard: "subprocess.Popen[bytes]"
    _messages: Connection
    _log: IO[bytes]
    ended: bool = False

    def result(self, check: Check) -> Result:
        """Wait for the result of the next check; if the worker ends or hangs, return a failure that describes it."""
        started = time.monotonic()
        stuck_pid = None
        try:
            if self._messages.poll(START_TIMEOUT_S):
                pid = int(self._messages.recv_bytes())
                if self._messages.poll(check.deadline_s + DEADLINE_MARGIN_S):
                    return Result.model_validate_json(self._messages.recv_bytes())
                stuck_pid = pid
        except (EOFError, OSError):
            pass  # it has ended, perhaps within a message
        self.ended = True
        message = self._describe_end(stuck_pid)
        return result_of(check, Status.FAILED, message, _CHANGE, time.monotonic() - started)

    def finish(self) -> None:
        """Wait until the worker has stopped its servers."""
        if not self.ended:
            self._messages.poll(SHUTDOWN_TIMEOUT_S)

    def _describe_end(self, stuck_pid: int | None) -> str:
        if stuck_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(stuck_pid, signal.SIGABRT)  # faulthandler dumps its threads, and it ends
        try:
            status = self._guard.wait(DEADLINE_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._guard.terminate()
            status = self._guard.wait()
        self._log.seek(0)
        output = _output_tail(self._log.read().decode(errors="replace"))
        ending = f"signal {status - 128}" if status > 128 else f"status {status}"
        message = (
            "expected the check to end, got a process that never releases the GIL; it was killed"
            if stuck_pid is not None
            else f"expected the process that plays the environment to stay alive, but it ended with {ending}"
        )
        return f"{message}; its output: {output}" if output else message


def _output_tail(text: str) -> str:
    """Return the end of a process's output; for a thread dump its first lines, which belong to the check."""
    _, fatal, dump = text.rpartition("Fatal Python error: ")
    return "\n".join(dump.splitlines()[:_DUMPED_LINES]) if fatal else text[-_TAIL_CHARS:].strip()


@contextmanager
def _run_worker(
    target: Target, limits: CheckLimits, token: str | None, checks: Sequence[Check]
) -> Iterator[_Worker]:
    messages, sender = Pipe(duplex=False)
    directory = tempfile.TemporaryDirectory(prefix="ropewalk-check-", ignore_cleanup_errors=True)
    with messages, directory as temporary, tempfile.TemporaryFile() as log:
        job = Job(target=target, limits=limits, token=token, checks=[check.name for check in checks])
        Path(temporary, JOB_FILE).write_text(job.model_dump_json(), encoding="utf-8")
        with sender:
            fd = sender.fileno()
            command = [*module_command("openenv_core.checker.worker"), str(fd)]
            guard = subprocess.Popen(
                guard_command(command, grace_s=CLEANUP_TIMEOUT_S, inherited_fd=fd, folder=temporary),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # the environment's output is not part of the report
                stderr=log,
                env={**os.environ, "TMPDIR": temporary},
                pass_fds=(fd,),
            )
        with guard:  # which closes its input, and so ends the worker, if it is running
            worker = _Worker(guard, messages, log)
            yield worker
            worker.finish()
