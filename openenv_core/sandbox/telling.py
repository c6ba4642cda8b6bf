"""From what became of a request to what is told of it: whose doing it was, in one word and in several."""

from typing import Final

from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.results import (
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_SANDBOX,
    EXIT_TIMEOUT,
    Execution,
    Status,
    Truncated,
)
from openenv_core.sandbox.worker import Exit, Reply
from openenv_core.signals import signal_name

ZYGOTE_ENDED: Final = "the process that interpreters are forked from has ended"

_STOPPED: Final[dict[str, tuple[Status, int, str]]] = {
    "timeout": ("timeout", EXIT_TIMEOUT, "it ran longer than {timeout:g} s"),
    "interrupt": ("error", EXIT_INTERRUPTED, "it was interrupted: whoever asked for it has given it up"),
    "output": ("output_limit", EXIT_KILLED, "it wrote more than {output} bytes"),
    "disk": (
        "killed",
        EXIT_KILLED,
        "its files grew beyond {disk} bytes or {files} files",
    ),
}
"""Status, exit code and words, by why the supervisor stopped an execution."""


def told(reply: Reply, timeout_s: float, limits: Limits) -> Execution:
    """Return what a reply means; it says nothing of the session.

    Args:
        reply: What became of a request.
        timeout_s: What it was given.
        limits: Of the session.
    """
    answer = reply.answer
    status: Status = "ok"
    code, reason = 0, None
    if answer is not None:
        status, code = answer.status, answer.exit_code  # type: ignore[assignment]
    if reply.stopped in _STOPPED:
        status, code, words = _STOPPED[reply.stopped]
        reason = words.format(
            timeout=timeout_s,
            output=limits.output_hard_bytes,
            disk=limits.disk_bytes,
            files=limits.files,
        )
    elif reply.exit is not None:
        status, code, reason = _of_exit(reply.exit, reply.stopped)
    elif answer is not None and answer.status == "rolled_back":
        status, reason = "killed", f"its process ended with status {code}; the state is that of before"
    return Execution(
        status=status,
        stdout=reply.stdout[0],
        stderr=reply.stderr[0],
        exit_code=code,
        error=None if answer is None else answer.error,
        result=None if answer is None or answer.text is None else answer.text.decode("utf-8", "replace"),
        outputs=() if answer is None else answer.outputs,
        execution_count=0 if answer is None else answer.count,
        state_lost=reply.exit is not None,
        truncated=Truncated(
            stdout=reply.stdout[1],
            stderr=reply.stderr[1],
            outputs=answer is not None and answer.truncated,
        ),
        signal=None if reply.exit is None else reply.exit.signal,
        execution_time_s=reply.took_s,
        max_rss_bytes=None if answer is None else answer.max_rss,
        reason=reason,
    )


def unavailable(why: str, session_id: str, isolation: str, took_s: float) -> Execution:
    """Return what is told where no interpreter could be had."""
    return Execution(
        status="sandbox_error",
        exit_code=EXIT_SANDBOX,
        session_id=session_id,
        state_lost=True,
        execution_time_s=took_s,
        isolation=isolation,
        reason=why,
    )


def _of_exit(exit_: Exit, broken: str | None) -> tuple[Status, int, str]:
    if exit_.zygote:
        return "sandbox_error", EXIT_SANDBOX, ZYGOTE_ENDED
    if broken is not None:
        return "killed", EXIT_KILLED, broken
    if exit_.memory:
        return "memory", EXIT_KILLED, "it used more memory than its limit"
    if exit_.signal is None:
        return "killed", exit_.code, f"it ended the interpreter with status {exit_.code}"
    return "killed", 128 + exit_.signal, f"the interpreter was ended by {signal_name(exit_.signal)}"
