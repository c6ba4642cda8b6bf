"""How an execution ended, in the words of `Execution`."""

import re
from dataclasses import dataclass
from typing import Final

from openenv_core.sandbox import CodeError, FileInfo, Status
from openenv_core.sandbox.results import EXIT_ERROR, EXIT_KILLED, EXIT_OK, EXIT_SANDBOX, EXIT_TIMEOUT

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_LAST_LINE: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?::\s*(?P<value>.*))?", re.DOTALL)

MOST_TRACEBACK_CHARS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of an execution; fields as in `Execution`.

    Attributes:
        files: None where whoever ran the code does not say, and the interpreter is to be asked.
    """

    status: Status = "ok"
    exit_code: int = EXIT_OK
    error: CodeError | None = None
    state_lost: bool = False
    reason: str | None = None
    signal: int | None = None
    max_rss_bytes: int | None = None
    files: tuple[FileInfo, ...] | None = None


def raised(error: CodeError) -> Verdict:
    """Return the verdict on code that ended with an exception; `SystemExit` is told by its code."""
    if error.ename == "MemoryError":
        return Verdict(status="memory", exit_code=EXIT_ERROR, error=error)
    if error.ename != "SystemExit":
        return Verdict(status="error", exit_code=EXIT_ERROR, error=error)
    carried = error.evalue.strip()
    if carried in ("", "None", "0"):
        return Verdict()
    number = int(carried) if re.fullmatch(r"-?\d{1,9}", carried) else EXIT_ERROR
    return Verdict(status="error", exit_code=number & 0xFF or EXIT_ERROR, error=error)


def overdue(reason: str, *, state_lost: bool) -> Verdict:
    """Return the verdict on code that took too long."""
    return Verdict(status="timeout", exit_code=EXIT_TIMEOUT, state_lost=state_lost, reason=reason)


def flooded(reason: str, *, state_lost: bool) -> Verdict:
    """Return the verdict on code that wrote too much."""
    return Verdict(status="output_limit", exit_code=EXIT_KILLED, state_lost=state_lost, reason=reason)


def killed(reason: str) -> Verdict:
    """Return the verdict on code whose interpreter died under it."""
    return Verdict(status="killed", exit_code=EXIT_KILLED, state_lost=True, reason=reason)


def failed(reason: str, state_lost: bool) -> Verdict:
    """Return the verdict on code that had no chance."""
    return Verdict(status="sandbox_error", exit_code=EXIT_SANDBOX, state_lost=state_lost, reason=reason)


def error_of(text: str) -> CodeError:
    """Read an exception from a traceback's text, whose last line names it."""
    lines = plain(text[-MOST_TRACEBACK_CHARS:]).strip("\n").split("\n")
    for index in range(len(lines) - 1, -1, -1):
        # A message may have lines of its own; the line that names the class begins at the margin.
        match = _LAST_LINE.fullmatch("\n".join(lines[index:]).strip())
        if match is not None and not lines[index].startswith((" ", "\t")):
            if match["value"] is None and index < len(lines) - 1:
                continue
            return CodeError(ename=match["name"], evalue=match["value"] or "", traceback=tuple(lines))
    return CodeError(ename="Exception", evalue=lines[-1] if lines else "", traceback=tuple(lines))


def plain(text: str) -> str:
    """Return a text without its colours, and without what no encoder could write."""
    clean = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return _COLOURS.sub("", clean)
