"""Parses an interpreter's answers, which are untrusted bytes, into executions."""

import json
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.inside.frames import FORK_NOTICE, MAX_HEADER
from openenv_core.sandbox.inside.interpreter import FRAME
from openenv_core.sandbox.results import (
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_SANDBOX,
    EXIT_TIMEOUT,
    CodeError,
    Execution,
    Output,
    Status,
    Truncated,
)
from openenv_core.signals import signal_name

_KINDS: Final = ("execute_result", "display_data")
_MAX_NAME_CHARS: Final = 200
"""Characters kept of the name of an exception class or a mime type."""


class ForgedAnswerError(Exception):
    """The answer cannot come from an unmodified interpreter: the code wrote to the control socket."""


Answer: TypeAlias = tuple[Execution, bytes | None]
"""The execution as the interpreter reports it, and its result's text or a called function's value as tagged JSON."""


class AnswerReader:
    """Assembles answers from the bytes received.

    Args:
        limit: Maximum size of an answer's texts, in bytes.
        announced: Whether a process that runs a request first announces itself by `FORK_NOTICE`.
    """

    def __init__(self, limit: int, *, announced: bool = False) -> None:
        self._limit = limit
        self._announced = announced
        self._buffer = bytearray()

    def feed(self, data: bytes, expected: int | None) -> Answer | None:
        """Add received bytes; return the answer once it is complete, else None.

        Args:
            data: The bytes received.
            expected: The number of the request in progress, if any.

        Raises:
            ForgedAnswerError: The bytes are not the answer to that request.
        """
        if expected is None:
            raise ForgedAnswerError("bytes without a request")
        buffer = self._buffer
        buffer += data
        while self._announced and buffer.startswith(FORK_NOTICE):
            del buffer[: len(FORK_NOTICE)]
        if len(buffer) < FRAME.size:
            return None
        head, texts = FRAME.unpack_from(buffer)
        if head > MAX_HEADER or texts > self._limit:
            raise ForgedAnswerError(f"an answer of {head + texts} bytes")
        beyond = len(buffer) - FRAME.size - head - texts
        if beyond < 0:
            return None
        if beyond > 0:
            raise ForgedAnswerError("bytes beyond the answer")
        frame = bytes(buffer)
        self._buffer = bytearray()
        return _read(frame[FRAME.size : FRAME.size + head], frame[FRAME.size + head :], expected)


def _read(head: bytes, texts: bytes, expected: int) -> Answer:
    try:
        raw = json.loads(head)
    except (ValueError, RecursionError):
        raise ForgedAnswerError("an answer that is not JSON") from None
    try:
        if raw["id"] != expected:
            raise ForgedAnswerError("the answer to another request")
        parts = _parts(texts, raw["lengths"])
        text = parts.pop(0) if raw.get("text") is True else None
        status, code, reason = raw["status"], _number(raw["exit_code"], 255), None
        if status == "rolled_back":
            status, reason = "killed", f"its process ended with status {code}; the state before it is kept"
        elif status not in ("ok", "error", "memory"):
            raise ForgedAnswerError("an unknown status")
        execution = Execution(
            status=status,
            exit_code=code,
            reason=reason,
            error=_error(raw.get("error")),
            outputs=_outputs(raw.get("outputs", ()), parts),
            cut=Truncated(outputs=raw.get("truncated") is True),
            execution_count=_number(raw.get("count", 0), 1 << 53),
            max_rss_bytes=_number(raw.get("max_rss", 0), 1 << 53),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration) as error:
        raise ForgedAnswerError(f"a malformed answer ({type(error).__name__})") from None
    return execution, text


def _parts(texts: bytes, lengths: Any) -> list[bytes]:
    parts, begin = [], 0
    for length in lengths:
        parts.append(texts[begin : begin + _number(length, len(texts))])
        begin += length
    if begin != len(texts):
        raise ValueError(begin)
    return parts


def _outputs(raw: Any, parts: list[bytes]) -> tuple[Output, ...]:
    outputs, left = [], iter(parts)
    for kind, mimes in raw:
        if kind not in _KINDS:
            raise ValueError(kind)
        data = {_name(mime): next(left).decode("utf-8", "replace") for mime in mimes}
        outputs.append(Output(output_type=kind, data=data))
    if next(left, None) is not None:
        raise ValueError(parts)
    return tuple(outputs)


def _error(raw: Any) -> CodeError | None:
    if raw is None:
        return None
    lines = tuple(map(_text, raw["traceback"]))
    return CodeError(ename=_name(raw["ename"]), evalue=_text(raw["evalue"]), traceback=lines)


def _number(raw: Any, most: int) -> int:
    if type(raw) is not int or not 0 <= raw <= most:
        raise ValueError(raw)
    return raw


def _name(raw: Any) -> str:
    return _text(raw)[:_MAX_NAME_CHARS]


def _text(raw: Any) -> str:
    if type(raw) is not str:
        raise TypeError(raw)
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return raw if raw.isascii() else raw.encode("utf-8", "replace").decode()


ZYGOTE_ENDED: Final = "the process that interpreters are forked from has ended"

_STOPPED: Final[dict[str | None, tuple[Status, int, str]]] = {
    "timeout": ("timeout", EXIT_TIMEOUT, "it ran longer than {timeout:g} s"),
    "interrupt": ("error", EXIT_INTERRUPTED, "it was interrupted, because its caller no longer waits for it"),
    "output": ("output_limit", EXIT_KILLED, "it wrote more than {output} bytes"),
    "disk": ("killed", EXIT_KILLED, "its files grew beyond {disk} bytes or {files} files"),
}
"""Status, exit code and reason of an execution, by why the supervisor stopped it."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How an interpreter's process ended.

    Attributes:
        code: Its exit code, if it exited.
        signal: The signal that killed it, if one did.
        zygote: Whether it died with the zygote.
        memory: Whether the kernel killed it because its control group ran out of memory.
    """

    code: int = 0
    signal: int | None = None
    zygote: bool = False
    memory: bool = False


def finalize_execution(
    execution: Execution, cause: str | None, exit_: Exit | None, limits: Limits, timeout_s: float = 0.0
) -> Execution:
    """Return an execution with its final status.

    Args:
        execution: The execution without it.
        cause: Why the supervisor stopped it, if it did: "timeout", "interrupt", "output", "disk", or a description of
            what the code broke.
        exit_: How the process ended; None if it is alive.
        limits: The session's limits.
        timeout_s: The execution's timeout.
    """
    if cause in _STOPPED:
        status, code, template = _STOPPED[cause]
        reason = template.format(
            timeout=timeout_s, output=limits.output_hard_bytes, disk=limits.disk_bytes, files=limits.files
        )
    elif exit_ is None:
        return execution
    elif exit_.zygote:
        status, code, reason = "sandbox_error", EXIT_SANDBOX, ZYGOTE_ENDED
    elif cause is not None:
        status, code, reason = "killed", EXIT_KILLED, cause
    elif exit_.memory:
        status, code, reason = "memory", EXIT_KILLED, "it used more memory than its limit"
    elif exit_.signal is None:
        status, code, reason = "killed", exit_.code, f"it ended the interpreter with status {exit_.code}"
    else:
        by = signal_name(exit_.signal)
        status, code, reason = "killed", 128 + exit_.signal, f"the interpreter was ended by {by}"
    signal = None if exit_ is None else exit_.signal
    return replace(
        execution, status=status, exit_code=code, reason=reason, state_lost=exit_ is not None, signal=signal
    )


_MAX_BYTES_PER_CHAR: Final = 6
"""Maximum size of a character in JSON, in bytes."""

_MAX_GROWTH: Final = 2
"""Factor by which a text may grow in JSON. Newlines and quotes need 2 bytes each, most control characters 6."""

_TRUNCATE_ATTEMPTS: Final = 4
"""Attempts to shorten a text by its average excess. Each scans the whole text."""


def truncate_execution(
    answer: Answer | None, stdout: tuple[str, bool], stderr: tuple[str, bool], limits: Limits
) -> Execution:
    """Return the execution of an answer, with its texts truncated to the session's limits.

    Args:
        answer: The interpreter's answer; None if it ended without one.
        stdout: The captured output, and whether some of it was dropped.
        stderr: As `stdout`.
        limits: The session's limits.
    """
    execution, text = answer or (Execution(status="ok"), None)
    out, err = (_truncate(written, _MAX_GROWTH * limits.output_bytes) for written, _ in (stdout, stderr))
    limit = _MAX_GROWTH * limits.outputs_bytes
    whole = (text or b"").decode("utf-8", "replace")
    result = _truncate(whole, limit)
    left = limit - _json_size(result)
    outputs: list[Output] = []
    for output in execution.outputs:
        left -= sum(map(_json_size, output.data.values()))
        if left < 0:
            break
        outputs.append(output)
    cut = Truncated(
        stdout=stdout[1] or out is not stdout[0],
        stderr=stderr[1] or err is not stderr[0],
        outputs=execution.cut.outputs or result is not whole or len(outputs) < len(execution.outputs),
    )
    shown = None if text is None else result
    return replace(execution, stdout=out, stderr=err, result=shown, outputs=tuple(outputs), cut=cut)


def _truncate(text: str, limit: int) -> str:
    """Return a text truncated to a number of bytes in JSON; the same object if it fits."""
    if _MAX_BYTES_PER_CHAR * len(text) <= limit:
        return text
    for _ in range(_TRUNCATE_ATTEMPTS):
        if (size := _json_size(text)) <= limit:
            return text
        text = text[: len(text) * limit // size]
    return text[: limit // _MAX_BYTES_PER_CHAR]


def _json_size(text: str) -> int:
    """Return a text's size in JSON, in bytes, without quotes. A control character may take six."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) - 2
