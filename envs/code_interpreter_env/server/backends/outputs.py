"""Results of a service's executions as the sandbox's `Execution`, with output cut to the sandbox's limits."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from openenv_core.sandbox import CodeError, Execution, Limits, Output, Status, Truncated
from openenv_core.sandbox.results import EXIT_ERROR, EXIT_KILLED, EXIT_SANDBOX, EXIT_TIMEOUT

MAX_TRACEBACK_CHARS: Final = 65_536

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINE: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?::\s*(?P<value>.*))?", re.DOTALL)
_EXIT_CODES: Final[Mapping[Status, int]] = {
    "timeout": EXIT_TIMEOUT,
    "output_limit": EXIT_KILLED,
    "sandbox_error": EXIT_SANDBOX,
}


def make_stopped_execution(status: Status, reason: str, *, state_lost: bool = False) -> Execution:
    """Return an execution for code that did not end by itself."""
    return Execution(status=status, exit_code=_EXIT_CODES[status], state_lost=state_lost, reason=reason)


def make_failed_execution(error: CodeError) -> Execution:
    """Return an execution for code that raised an exception; for `SystemExit`, its exit code decides."""
    if error.ename == "MemoryError":
        return Execution(status="memory", exit_code=EXIT_ERROR, error=error)
    if error.ename != "SystemExit":
        return Execution(status="error", exit_code=EXIT_ERROR, error=error)
    exit_value = error.evalue.strip()
    if exit_value in ("", "None", "0"):
        return Execution(status="ok")
    exit_code = int(exit_value) if re.fullmatch(r"-?\d{1,9}", exit_value) else EXIT_ERROR
    return Execution(status="error", exit_code=exit_code & 0xFF or EXIT_ERROR, error=error)


def parse_traceback(text: str) -> CodeError:
    """Parse the exception, which the last line names, from the text of a traceback."""
    lines = _COLOURS.sub("", _encodable(text[-MAX_TRACEBACK_CHARS:])).strip("\n").split("\n")
    for index in range(len(lines) - 1, -1, -1):
        # A message may span lines; the line that names the class is not indented.
        match = _LAST_LINE.fullmatch("\n".join(lines[index:]).strip())
        if match is not None and not lines[index].startswith((" ", "\t")):
            if match["value"] is None and index < len(lines) - 1:
                continue
            return CodeError(ename=match["name"], evalue=match["value"] or "", traceback=tuple(lines))
    return CodeError(ename="Exception", evalue=lines[-1] if lines else "", traceback=tuple(lines))


class OutputCollector:
    """Collects the output of one execution, within the limits.

    Attributes:
        bytes_written: The size of all output, including what was dropped.
    """

    def __init__(self, limits: Limits) -> None:
        self.bytes_written = 0
        self._limits = limits
        self._buffers = {"stdout": bytearray(), "stderr": bytearray()}
        self._cut: set[str] = set()
        self._outputs: list[Output] = []
        self._outputs_left = limits.outputs_bytes
        self._result: str | None = None

    def write(self, stream: str, text: str) -> None:
        """Add text written to stdout or stderr."""
        data, buffer = text.encode("utf-8", "replace"), self._buffers[stream]
        self.bytes_written += len(data)
        bytes_left = self._limits.output_bytes - len(buffer)
        buffer += data[:bytes_left]
        if len(data) > bytes_left:
            self._cut.add(stream)

    def show(self, kind: str, bundle: Mapping[str, Any]) -> None:
        """Add a mime bundle, of an execution's result or of displayed data. A bundle over the limit is dropped."""
        output_type: Literal["execute_result", "display_data"] = (
            "execute_result" if kind == "execute_result" else "display_data"
        )
        data = {str(mime): _as_text(str(mime), value) for mime, value in bundle.items() if value is not None}
        size = sum(len(mime) + len(text.encode("utf-8", "replace")) for mime, text in data.items())
        self.bytes_written += size
        if size > self._outputs_left or len(self._outputs) >= self._limits.files:
            self._cut.add("outputs")
            return
        self._outputs_left -= size
        self._outputs.append(Output(output_type=output_type, data=data, metadata={}))
        if output_type == "execute_result":
            self._result = data.get("text/plain")

    def note_loss(self) -> None:
        """Mark all output as truncated, because some of it has an unknown form."""
        self._cut.update(self._buffers, ("outputs",))

    def fill(self, execution: Execution) -> Execution:
        """Return an execution with the collected output."""
        return replace(
            execution,
            stdout=self._text("stdout"),
            stderr=self._text("stderr"),
            result=self._result,
            outputs=tuple(self._outputs),
            cut=Truncated(**dict.fromkeys(self._cut, True)),
        )

    def _text(self, name: str) -> str:
        # Leave out a character that the limit has cut in two.
        return self._buffers[name].decode("utf-8", "ignore" if name in self._cut else "replace")


def _as_text(mime: str, value: Any) -> str:
    """Return a value of a mime bundle as text: nbformat also allows lists of lines, and objects for JSON."""
    if isinstance(value, list) and not mime.endswith("json") and all(isinstance(line, str) for line in value):
        value = "".join(value)
    return _encodable(value if isinstance(value, str) else json.dumps(value))


def _encodable(text: str) -> str:
    """Return a text without characters that cannot be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
