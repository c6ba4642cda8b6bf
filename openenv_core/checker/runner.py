"""Running checks, one after the other, whatever they or their subject do."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import IO, Any, Final

from openenv_core.checker.check import Check, CheckError, CheckLevel, CheckWarnedError, NotApplicableError
from openenv_core.checker.outcomes import CheckTimeoutError, cause_of, within
from openenv_core.checker.subject import CheckLimits, Subject
from openenv_core.errors import ClientError, ConnectionFailedError, ExecutionError, RequestTimeoutError
from openenv_core.targets import Target


class Status(StrEnum):
    """How a check came out."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"
    CRASHED = "crashed"


SEE: Final = "see what the server prints under `ropewalk serve`, and what the environment raises"

BAD: Final = frozenset({Status.FAILED, Status.CRASHED})


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one check.

    Attributes:
        check: Its name.
        level: What it looks at.
        says: The property.
        status: How it came out.
        message: What was expected and what came; why it was skipped; the last line of the traceback; a figure
            or a note where it passed.
        change: What the author should change.
        seconds: How long it took.
    """

    check: str
    level: CheckLevel
    says: str
    status: Status
    message: str
    change: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What came of all of them.

    Attributes:
        target: What was looked at.
        results: One a check, in the order in which they ran.
        interrupted: Whether others were to follow.
    """

    target: str
    results: tuple[Result, ...]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything ran, and nothing failed or crashed."""
        return not self.interrupted and not any(result.status in BAD for result in self.results)

    def of(self, *statuses: Status) -> list[Result]:
        """Return the results of some statuses."""
        return [result for result in self.results if result.status in statuses]


def run(
    subject: Subject,
    checks: Sequence[Check],
    *,
    before: Callable[[Check], None] = lambda _: None,
    after: Callable[[Result], None] = lambda _: None,
) -> CheckReport:
    """Run checks on a subject.

    Args:
        subject: What is looked at; it is left open.
        checks: Which, in their order.
        before: Told of each check before it runs.
        after: Told of each result.
    """
    return CheckReport(subject.target.text, tuple(_results(subject, checks, before, after)))


def _results(
    subject: Subject,
    checks: Iterable[Check],
    before: Callable[[Check], None],
    after: Callable[[Result], None],
) -> Iterable[Result]:
    for one in checks:
        before(one)
        result = run_check(subject, one)
        after(result)
        yield result


def run_check(subject: Subject, check: Check) -> Result:
    """Run one check, in a thread and with its deadline."""
    started = time.monotonic()
    status, message, change = _outcome(subject, check)
    return Result(check.name, check.level, check.says, status, message, change, time.monotonic() - started)


def _outcome(subject: Subject, check: Check) -> tuple[Status, str, str]:
    try:
        note = within(check.deadline_s, lambda: check(subject), f"openenv-check-{check.name}")
    except CheckError as failure:
        return _told_once(subject, check, failure)
    except CheckWarnedError as warning:
        return Status.WARNED, warning.message, warning.change
    except NotApplicableError as reason:
        return Status.SKIPPED, reason.reason, ""
    except CheckTimeoutError:
        return (
            Status.FAILED,
            f"expected the check to end within {check.deadline_s:g} s, got no end",
            "find what the environment waits for: each reset, step and read of the state should end by itself",
        )
    except RequestTimeoutError as error:
        return (
            Status.FAILED,
            f"expected a reply within {subject.limits.step_timeout_s:g} s, got none: {error}",
            "make reset, step and state end sooner, or allow them more with --step-timeout",
        )
    except ExecutionError as error:
        raised = CheckError(
            f"expected the environment to answer, got {type(error).__name__}: {error}",
            change="see where the environment raises it: `ropewalk serve` with the same target shows the traceback; "
            "what its reset needs besides a seed goes into validation.episodes.reset_options of openenv.yaml",
            cause=cause_of(error),
        )
        return _told_once(subject, check, raised)
    except ConnectionFailedError as error:
        away = CheckError(f"expected a server that answers, got {cause_of(error)}", change=SEE)
        return _told_once(subject, check, away)
    except ClientError as error:
        return Status.FAILED, f"expected a server that answers, got {cause_of(error)}", SEE
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of anybody's code
        last = traceback.format_exception_only(error)[-1].strip()
        return (
            Status.CRASHED,
            f"{last} ({_where(error)})",
            "the check met what it does not know; look at what the environment does, and report the check",
        )
    return Status.PASSED, note or "", ""


def _told_once(subject: Subject, check: Check, failure: CheckError) -> tuple[Status, str, str]:
    # What keeps one check from looking keeps many: a server that does not start, a manifest that is wrong.
    first = subject.told.setdefault(failure.cause, check.name)
    if first != check.name:
        return Status.SKIPPED, f"as {first}", ""
    return Status.FAILED, failure.message, failure.change


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"


START_TIMEOUT_S: Final = 60.0
"""How long, in seconds, a worker may take to import what it needs."""

DEADLINE_MARGIN_S: Final = 15.0
"""Beyond a check's own deadline, which a thread cannot enforce on code that never lets go of the interpreter."""

SHUTDOWN_TIMEOUT_S: Final = 60.0
"""How long a worker may take to stop its servers at the end."""

TAIL_CHARS: Final = 2000

CHANGE: Final = (
    "leave the process alone: no os._exit, no abort, no library that crashes; run what may crash in a process of "
    "its own"
)


def run_isolated(
    target: Target,
    limits: CheckLimits,
    checks: Sequence[Check],
    *,
    token: str | None = None,
    before: Callable[[Check], None] = lambda _: None,
    after: Callable[[Result], None] = lambda _: None,
) -> CheckReport:
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
    return CheckReport(target.text, tuple(results))


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
        until = started + START_TIMEOUT_S
        while (event := self._next(until)) is not None:
            if event.get("begin") == check.name:
                until = time.monotonic() + check.deadline_s + DEADLINE_MARGIN_S
            elif "end" in event:
                found = event["end"]
                return Result(
                    **{**found, "level": CheckLevel(found["level"]), "status": Status(found["status"])}
                )
        self.ended = True
        message = self._what_became(time.monotonic() > until)
        seconds = time.monotonic() - started
        return Result(check.name, check.level, check.says, Status.FAILED, message, CHANGE, seconds)

    def finish(self) -> None:
        """Wait until it has stopped what it started."""
        until = time.monotonic() + SHUTDOWN_TIMEOUT_S
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
        self._process.wait(DEADLINE_MARGIN_S)
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
        process.wait(DEADLINE_MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
