"""Running checks in another process, and going on with the next one whatever the environment does to it.

An environment that ends its process, that crashes the interpreter or that never lets go of it takes a worker with
it, which is a finding, and never the command.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any, Final

from openenv_core.checker.check import Check, Level
from openenv_core.checker.runner import Report, Result, Status
from openenv_core.checker.subject import Limits
from openenv_core.targets import Target

START_S: Final = 60.0
"""How long, in seconds, a worker may take to import what it needs."""

MARGIN_S: Final = 15.0
"""Beyond a check's own deadline, which a thread cannot enforce on code that never lets go of the interpreter."""

END_S: Final = 60.0
"""How long a worker may take to stop its servers at the end."""

TAIL_CHARS: Final = 2000

CHANGE: Final = (
    "leave the process alone: no os._exit, no abort, no library that crashes; run what may crash in a process of "
    "its own"
)


def run_isolated(
    target: Target,
    limits: Limits,
    checks: Sequence[Check],
    *,
    token: str | None = None,
    before: Callable[[Check], None] = lambda _: None,
    after: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Run checks on a target, as `runner.run` does, in worker processes.

    Args:
        target: What is looked at.
        limits: How much is tried.
        checks: Which, in their order.
        token: Bearer token of the server, where a URL asks for one.
        before: Told of each check before it runs.
        after: Told of each result.
    """
    results: list[Result] = []
    while len(results) < len(checks):
        left = checks[len(results) :]
        order = {
            "kind": target.kind,
            "text": target.text,
            "folder": None if target.folder is None else str(target.folder),
            "limits": asdict(limits),
            "token": token,
            "checks": [one.name for one in left],
        }
        with _worker(order) as worker:
            for one in left:
                before(one)
                result = worker.result_of(one)
                results.append(result)
                after(result)
                if worker.ended:
                    break
    return Report(target.text, tuple(results))


class _Worker:
    def __init__(self, process: "subprocess.Popen[bytes]", events: int, log: IO[bytes]) -> None:
        self._process = process
        self._events = events
        self._log = log
        self._unread = b""
        self.ended = False

    def result_of(self, check: Check) -> Result:
        """Wait for the result of a check, which is the next; of what became of the worker, where none comes."""
        started = time.monotonic()
        until = started + START_S
        while (event := self._next(until)) is not None:
            if event.get("begin") == check.name:
                until = time.monotonic() + check.deadline_s + MARGIN_S
            elif "end" in event:
                found = event["end"]
                return Result(**{**found, "level": Level(found["level"]), "status": Status(found["status"])})
        self.ended = True
        message = self._what_became(time.monotonic() > until)
        seconds = time.monotonic() - started
        return Result(check.name, check.level, check.says, Status.FAILED, message, CHANGE, seconds)

    def finish(self) -> None:
        """Wait until it has stopped what it started."""
        until = time.monotonic() + END_S
        while not self.ended and self._next(until) is not None:
            pass

    def _next(self, until: float) -> dict[str, Any] | None:
        """Return what it says next; None when it has gone, or nothing came in time."""
        while b"\n" not in self._unread:
            if not select.select([self._events], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (read := os.read(self._events, 65_536)):
                return None
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _what_became(self, late: bool) -> str:
        if late:
            self._process.kill()
            return "expected the check to end, got a process that never lets go of the interpreter; it was killed"
        self._process.wait(MARGIN_S)
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"status {status}"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-TAIL_CHARS:].strip()
        return (
            f"expected the process that plays the environment to live on, but it ended with {how}"
            f"{f'; it said: {said}' if said else ''}"
        )


@contextmanager
def _worker(order: dict[str, Any]) -> Iterator[_Worker]:
    read, write = os.pipe()
    # A worker that is ended in the middle of a check leaves the check's temporary files behind: they go with these.
    place = tempfile.TemporaryDirectory(prefix="ropewalk-check-", ignore_cleanup_errors=True)
    with place as temporary, tempfile.TemporaryFile() as log:
        try:
            # What an environment prints is no part of the report.
            process = subprocess.Popen(
                [sys.executable, "-m", "openenv_core.checker.worker", str(write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "TMPDIR": temporary},
                pass_fds=(write,),
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        assert process.stdin is not None
        worker = _Worker(process, read, log)
        try:
            with suppress(
                BrokenPipeError
            ):  # it has ended already, which is found out where its results are read
                process.stdin.write(json.dumps({**order, "temporary": temporary}).encode() + b"\n")
                process.stdin.flush()
            yield worker
            worker.finish()
        finally:
            _end(process)
            os.close(read)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a worker that has not: its servers end with it, at the latest by their guards."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
