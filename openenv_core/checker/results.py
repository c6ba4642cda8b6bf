"""Runs a check, and reports results on the console and as JSON."""

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TextIO

from pydantic import BaseModel, ConfigDict

from openenv_core.checker.check import (
    Check,
    CheckError,
    CheckLevel,
    CheckTimeoutError,
    CheckWarnedError,
    NotApplicableError,
    run_with_timeout,
)
from openenv_core.checker.subject import Subject
from openenv_core.cli.command import sanitize
from openenv_core.errors import ClientError, ConnectionFailedError, ExecutionError, RequestTimeoutError


class Status(StrEnum):
    """The status of a check that has run."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"
    CRASHED = "crashed"


BAD: Final = frozenset({Status.FAILED, Status.CRASHED})


class Result(BaseModel):
    """The result of one check.

    Attributes:
        check: The check's name.
        level: The check's level.
        description: The property, in one sentence.
        status: The status.
        message: What was expected and what happened; the reason if it was skipped; the last line of the traceback if it
            crashed; a note, if any, if it passed.
        change: What the author should change.
        seconds: The duration.
    """

    model_config = ConfigDict(frozen=True)

    check: str
    level: CheckLevel
    description: str
    status: Status
    message: str
    change: str
    seconds: float


def result_of(check: Check, status: Status, message: str, change: str, seconds: float) -> Result:
    """Return the result of a check."""
    return Result(
        check=check.name,
        level=check.level,
        description=check.description,
        status=status,
        message=message,
        change=change,
        seconds=round(seconds, 4),
    )


def run_check(subject: Subject, check: Check) -> Result:
    """Run a check in a thread, with its deadline."""
    started = time.monotonic()
    status, message, change = _outcome(subject, check)
    return result_of(check, status, message, change, time.monotonic() - started)


def _outcome(subject: Subject, check: Check) -> tuple[Status, str, str]:
    try:
        note = run_with_timeout(
            check.deadline_s, lambda: check.function(subject), f"openenv-check-{check.name}"
        )
    except CheckWarnedError as warning:
        return Status.WARNED, warning.message, warning.change
    except NotApplicableError as reason:
        return Status.SKIPPED, str(reason), ""
    except CheckError as error:
        failure = error
    except CheckTimeoutError:
        failure = CheckError(
            f"expected the check to end within {check.deadline_s:g} s, got no end",
            change="find what the environment waits for: each reset, step and read of the state should end by itself",
            cause=check.name,
        )
    except RequestTimeoutError as error:
        failure = CheckError(
            f"expected a reply within {subject.limits.step_timeout_s:g} s, got none: {error}",
            change="make reset, step and state faster, or raise --step-timeout",
            cause=check.name,
        )
    except ExecutionError as error:
        text = f"{type(error).__name__}: {error}"
        failure = CheckError(
            f"expected the environment to answer, got {text}",
            change="run `ropewalk serve` with the same target to see the traceback; options that reset needs besides "
            "a seed belong in validation.episodes.reset_options of openenv.yaml",
            cause=text,
        )
    except ClientError as error:
        text = f"{type(error).__name__}: {error}"
        failure = CheckError(
            f"expected a server that answers, got {text}",
            change="see the server's output, for example under `ropewalk serve`, and the environment's exceptions",
            cause=text if isinstance(error, ConnectionFailedError) else check.name,
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by the environment's code, or by the check
        summary = traceback.format_exception_only(error)[-1].strip()
        return (
            Status.CRASHED,
            f"{summary} ({_describe_location(error)})",
            "the check met an unknown problem: see what the environment does, and report it as a bug of the check",
        )
    else:
        return Status.PASSED, note or "", ""
    # One cause, a server that does not start for example, often fails many checks; it is reported once.
    first = subject.reported.setdefault(failure.cause, check.name)
    if first != check.name:
        return Status.SKIPPED, f"as {first}", ""
    return Status.FAILED, failure.message, failure.change


def _describe_location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"


_MARKS: Final[Mapping[Status, tuple[str, int]]] = {
    Status.PASSED: ("✓", 32),
    Status.WARNED: ("?", 33),
    Status.FAILED: ("✗", 31),
    Status.SKIPPED: ("-", 2),
    Status.CRASHED: ("!", 35),
}
"""The mark of each status, and its ANSI colour."""

_WIDTH: Final = 30


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all checks."""

    target: str
    results: tuple[Result, ...]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether all checks ran, and none failed or crashed."""
        return not self.interrupted and not self.of(*BAD)

    def of(self, *statuses: Status) -> list[Result]:
        """Return the results with one of these statuses."""
        return [result for result in self.results if result.status in statuses]


@dataclass(slots=True)
class Console:
    """Writes a line per check as it ends, then the failures."""

    out: TextIO
    total: int
    results: list[Result] = field(default_factory=list)

    def begin(self, check: Check) -> None:
        """Write the level before its first check and, on a terminal, the name of the check that starts."""
        if not self.results or check.level is not self.results[-1].level:
            self._write(f"{check.level}\n")
        if self.out.isatty():
            self._write(f"  … {check.name} ({len(self.results) + 1} of {self.total})")

    def end(self, result: Result) -> None:
        """Keep and write a check's result."""
        self.results.append(result)
        # The message may contain the environment's output, which must not move the cursor.
        note = "" if result.change else " ".join(sanitize(result.message).split())
        line = f"  {self._mark(result)} {result.check:<{_WIDTH}} {result.seconds:7.2f} s  {note}"
        self._write(f"{self._line_start}{line.rstrip()}\n")

    def finish(self, report: CheckReport) -> None:
        """Write failures and warnings with what to change, and the number of results by status, or the interruption."""
        count = len(report.results)
        if report.interrupted:
            self._write(f"{self._line_start}interrupted after {count} of {self.total} checks\n")
            return
        for result in report.of(*BAD, Status.WARNED):
            self._write(
                f"\n{self._mark(result)} {result.level}.{result.check}: {result.description}\n"
                f"    {result.status}: {_indent(result.message)}\n"
                f"    change: {_indent(result.change)}\n"
            )
        elapsed_s = sum(result.seconds for result in report.results)
        counts = ", ".join(f"{number} {name}" for name, number in _summary(report).items() if number)
        self._write(
            f"\n{report.target}: {count} check{'' if count == 1 else 's'}: {counts or 'none'} in {elapsed_s:.1f} s\n"
        )

    @property
    def _line_start(self) -> str:
        """Clears the name of the check that runs, on a terminal."""
        return "\r\x1b[K" if self.out.isatty() else ""

    def _mark(self, result: Result) -> str:
        mark, colour = _MARKS[result.status]
        if not self.out.isatty() or os.environ.get("NO_COLOR"):
            return mark
        return f"\x1b[{colour}m{mark}\x1b[0m"

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def _summary(report: CheckReport) -> dict[str, int]:
    return {status.value: len(report.of(status)) for status in Status}


def as_json(report: CheckReport) -> str:
    """Return the report as a JSON document."""
    head = {
        "target": report.target,
        "ok": report.ok,
        "interrupted": report.interrupted,
        "summary": _summary(report),
    }
    return json.dumps({**head, "results": [result.model_dump() for result in report.results]}, indent=2)


def format_list(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of the list of checks."""
    level = None
    for check in checks:
        if check.level is not level:
            level = check.level
            yield str(level)
        yield f"  {check.name:<{_WIDTH}} {check.description}"


def _indent(text: str) -> str:
    return sanitize(text).strip().replace("\n", "\n        ")
