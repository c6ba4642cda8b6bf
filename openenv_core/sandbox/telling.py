"""From what became of a request to what is told of it: whose doing it was, in one word and in several."""

from typing import Final

from openenv_core.sandbox.answers import Answer
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.results import (
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_SANDBOX,
    EXIT_TIMEOUT,
    Execution,
    Output,
    Status,
    Truncated,
)
from openenv_core.sandbox.worker import Exit, Reply
from openenv_core.signals import signal_name

_WORST: Final = 6
"""Bytes that a character takes at most when it is sent."""

_GROWTH: Final = 2
"""By so much a text may grow when it is sent, of which lines and quotes ask little, and control characters six."""

_ATTEMPTS: Final = 4
"""At shortening a text by how much it is too long on the average; each looks at all of it."""

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
    stdout, stderr = (
        _fitting(text, _GROWTH * limits.output_bytes) for text, _ in (reply.stdout, reply.stderr)
    )
    result, outputs, whole = _shown(answer, _GROWTH * limits.outputs_bytes)
    return Execution(
        status=status,
        stdout=stdout,
        stderr=stderr,
        exit_code=code,
        error=None if answer is None else answer.error,
        result=result,
        outputs=outputs,
        execution_count=0 if answer is None else answer.count,
        state_lost=reply.exit is not None,
        truncated=Truncated(
            stdout=reply.stdout[1] or stdout is not reply.stdout[0],
            stderr=reply.stderr[1] or stderr is not reply.stderr[0],
            outputs=answer is not None and (answer.truncated or not whole),
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


def _shown(answer: Answer | None, limit: int) -> tuple[str | None, tuple[Output, ...], bool]:
    """Return the result and the outputs as far as they are to be sent, and whether that is all of them."""
    if answer is None:
        return None, (), True
    text = None if answer.text is None else answer.text.decode("utf-8", "replace")
    result = None if text is None else _fitting(text, limit)
    left = limit - _sent(result or "")
    outputs = []
    for output in answer.outputs:
        left -= sum(map(_sent, output.data.values()))
        if left < 0:
            break
        outputs.append(output)
    return result, tuple(outputs), result is text and len(outputs) == len(answer.outputs)


def _fitting(text: str, limit: int) -> str:
    """Return a text as far as it is to be sent in so many bytes; the same object where that is all of it."""
    if _WORST * len(text) <= limit:
        return text
    for _ in range(_ATTEMPTS):
        if (size := _sent(text)) <= limit:
            return text
        text = text[: len(text) * limit // size]
    return text[: limit // _WORST]


def _sent(text: str) -> int:
    """Return how many bytes a text takes in JSON, where a control character takes six."""
    plain = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    controls = sum(text.count(chr(number)) for number in range(32))
    return plain + 5 * controls - 4 * sum(map(text.count, "\b\t\n\f\r")) + text.count('"') + text.count("\\")


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
