"""Running one check, whatever it or its subject does, and how it comes out."""

import time
import traceback
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict

from openenv_core.checker.check import (
    Check,
    CheckError,
    CheckLevel,
    CheckTimeoutError,
    CheckWarnedError,
    NotApplicableError,
    within,
)
from openenv_core.checker.subject import Subject
from openenv_core.errors import ClientError, ConnectionFailedError, ExecutionError, RequestTimeoutError


class Status(StrEnum):
    """How a check came out."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"
    CRASHED = "crashed"


BAD: Final = frozenset({Status.FAILED, Status.CRASHED})


class Result(BaseModel):
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

    model_config = ConfigDict(frozen=True)

    check: str
    level: CheckLevel
    says: str
    status: Status
    message: str
    change: str
    seconds: float


def result_of(check: Check, status: Status, message: str, change: str, seconds: float) -> Result:
    """Return the result of a check."""
    return Result(
        check=check.name,
        level=check.level,
        says=check.says,
        status=status,
        message=message,
        change=change,
        seconds=seconds,
    )


def run_check(subject: Subject, check: Check) -> Result:
    """Run one check, in a thread and with its deadline."""
    started = time.monotonic()
    status, message, change = _outcome(subject, check)
    return result_of(check, status, message, change, time.monotonic() - started)


def _outcome(subject: Subject, check: Check) -> tuple[Status, str, str]:
    try:
        note = within(check.deadline_s, lambda: check.function(subject), f"openenv-check-{check.name}")
    except CheckWarnedError as warning:
        return Status.WARNED, warning.message, warning.change
    except NotApplicableError as reason:
        return Status.SKIPPED, str(reason), ""
    except (CheckError, CheckTimeoutError, ClientError) as error:
        failure = _failure(subject, check, error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of anybody's code
        last = traceback.format_exception_only(error)[-1].strip()
        return (
            Status.CRASHED,
            f"{last} ({_where(error)})",
            "the check met what it does not know; look at what the environment does, and report the check",
        )
    else:
        return Status.PASSED, note or "", ""
    # What keeps one check from looking keeps many: a server that does not start, a manifest that is wrong.
    first = subject.told.setdefault(failure.cause, check.name)
    if first != check.name:
        return Status.SKIPPED, f"as {first}", ""
    return Status.FAILED, failure.message, failure.change


def _failure(
    subject: Subject, check: Check, error: CheckError | CheckTimeoutError | ClientError
) -> CheckError:
    """Return what a check failed of; what the client met is told as a finding."""
    if isinstance(error, CheckError):
        return error
    if isinstance(error, CheckTimeoutError):
        return CheckError(
            f"expected the check to end within {check.deadline_s:g} s, got no end",
            change="find what the environment waits for: each reset, step and read of the state should end by itself",
            cause=check.name,
        )
    if isinstance(error, RequestTimeoutError):
        return CheckError(
            f"expected a reply within {subject.limits.step_timeout_s:g} s, got none: {error}",
            change="make reset, step and state end sooner, or allow them more with --step-timeout",
            cause=check.name,
        )
    met = f"{type(error).__name__}: {error}"
    if isinstance(error, ExecutionError):
        return CheckError(
            f"expected the environment to answer, got {met}",
            change="see where the environment raises it: `ropewalk serve` with the same target shows the traceback; "
            "what its reset needs besides a seed goes into validation.episodes.reset_options of openenv.yaml",
            cause=met,
        )
    return CheckError(
        f"expected a server that answers, got {met}",
        change="see what the server prints under `ropewalk serve`, and what the environment raises",
        cause=met if isinstance(error, ConnectionFailedError) else check.name,
    )


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
