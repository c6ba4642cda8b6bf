"""Running checks, one after the other, whatever they or their subject do."""

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from openenv_core.checker.check import Check, CheckFailed, CheckWarned, Level, NotApplicable
from openenv_core.checker.deadline import Overran, within
from openenv_core.checker.outcomes import cause_of
from openenv_core.checker.subject import Subject
from openenv_core.errors import ClientError, ConnectionFailed, ExecutionFailed, RequestTimeout


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
    level: Level
    says: str
    status: Status
    message: str
    change: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
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
) -> Report:
    """Run checks on a subject.

    Args:
        subject: What is looked at; it is left open.
        checks: Which, in their order.
        before: Told of each check before it runs.
        after: Told of each result.
    """
    return Report(subject.target.text, tuple(_results(subject, checks, before, after)))


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
    except CheckFailed as failure:
        return _told_once(subject, check, failure)
    except CheckWarned as warning:
        return Status.WARNED, warning.message, warning.change
    except NotApplicable as reason:
        return Status.SKIPPED, reason.reason, ""
    except Overran:
        return (
            Status.FAILED,
            f"expected the check to end within {check.deadline_s:g} s, got no end",
            "find what the environment waits for: each reset, step and read of the state should end by itself",
        )
    except RequestTimeout as error:
        return (
            Status.FAILED,
            f"expected a reply within {subject.limits.step_timeout_s:g} s, got none: {error}",
            "make reset, step and state end sooner, or allow them more with --step-timeout",
        )
    except ExecutionFailed as error:
        raised = CheckFailed(
            f"expected the environment to answer, got {type(error).__name__}: {error}",
            change="see where the environment raises it: `ropewalk serve` with the same target shows the traceback; "
            "what its reset needs besides a seed goes into validation.episodes.reset_options of openenv.yaml",
            cause=cause_of(error),
        )
        return _told_once(subject, check, raised)
    except ConnectionFailed as error:
        away = CheckFailed(f"expected a server that answers, got {cause_of(error)}", change=SEE)
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


def _told_once(subject: Subject, check: Check, failure: CheckFailed) -> tuple[Status, str, str]:
    # What keeps one check from looking keeps many: a server that does not start, a manifest that is wrong.
    first = subject.told.setdefault(failure.cause, check.name)
    if first != check.name:
        return Status.SKIPPED, f"as {first}", ""
    return Status.FAILED, failure.message, failure.change


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
