"""Conversion of executions to observations and tool results."""

import base64
import mimetypes
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any, Final
from urllib.parse import quote

from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.sandbox import CodeError, Execution, Output
from openenv_core.sandbox.results import EXIT_ERROR, EXIT_SANDBOX
from openenv_core.tools import Content, Embedded, Image, Text, ToolError, ToolErrorType, ToolResult

from ..models import EXECUTION, CodeInterpreterObservation, CodeObservation, FileContent

_FIELDS: Final = tuple(field.name for field in fields(Execution))
_RELEASED: Final = ("stdout", "stderr", "exit_code")

LAST_CODE: Final = "last_code"
"""The metadata key under which released coding environments return the code that ran."""


def to_observation(execution: Execution, **fields: Any) -> CodeInterpreterObservation:
    """Convert an execution to an observation, without validation: its values were checked by their source."""
    return CodeInterpreterObservation.model_construct(
        **{name: getattr(execution, name) for name in _FIELDS}, **fields
    )


def to_released(execution: Execution, code: str | None) -> CodeObservation:
    """Convert an execution to the shape of released clients, which reject any other key.

    Their only place for details is stderr, so it also gets the traceback and the reason why code was stopped.

    Args:
        execution: The execution; values without a released field go into `metadata["execution"]`.
        code: The code that ran; None after a reset.
    """
    other_fields = {name: value for name, value in asdict(execution).items() if name not in _RELEASED}
    if (stderr := _stderr_with_reason(execution)) != execution.stderr:
        other_fields["stderr"] = execution.stderr
    metadata = {EXECUTION: other_fields} if code is None else {LAST_CODE: code, EXECUTION: other_fields}
    return CodeObservation.model_construct(
        stdout=execution.stdout, stderr=stderr, exit_code=execution.exit_code, metadata=metadata
    )


def content_of(path: str, data: bytes) -> FileContent:
    """Return a file in its wire format."""
    return FileContent.model_construct(
        path=path, size=len(data), content_base64=base64.b64encode(data).decode("ascii")
    )


def make_code_error(ename: str, evalue: str) -> Execution:
    """Return an execution for an invalid request, which counts as the policy's error."""
    error = CodeError(ename=ename, evalue=evalue)
    return Execution(status="error", exit_code=EXIT_ERROR, error=error, stderr=f"{ename}: {evalue}\n")


def make_failure(reason: str, **fields: Any) -> Execution:
    """Return an execution for an infrastructure failure, which is not the code's fault."""
    return Execution(status="sandbox_error", exit_code=EXIT_SANDBOX, reason=reason, **fields)


def _stderr_with_reason(execution: Execution) -> str:
    lines = [] if execution.error is None else _error_lines(execution.error)
    if execution.reason is not None:
        lines.append(execution.reason)
    if not lines:
        return execution.stderr
    stderr_lines = [execution.stderr.removesuffix("\n")] if execution.stderr else []
    return "\n".join([*stderr_lines, *lines, ""])


def _error_lines(error: CodeError) -> list[str]:
    return [line.removesuffix("\n") for line in error.traceback] or [f"{error.ename}: {error.evalue}"]


IMAGES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The image types that callers can be expected to display."""

_ERRORS: Final = {"timeout": ToolErrorType.TIMEOUT, "sandbox_error": ToolErrorType.TRANSPORT_ERROR}


def to_run_result(observation: CodeInterpreterObservation) -> ToolResult:
    """Return the tool result of running code."""
    contents = list(_iter_contents(observation))
    error = observation.error
    data: dict[str, Any] = {
        "status": observation.status,
        "stdout": observation.stdout,
        "stderr": observation.stderr,
        "result": observation.result,
        "exit_code": observation.exit_code,
        "error": None if error is None else asdict(error),
        "reason": observation.reason,
        "state_lost": observation.state_lost,
        "cut": asdict(observation.cut),
        "files": [asdict(file) for file in observation.files],
    }
    failure, metadata = None, {}
    if observation.status != "ok":
        message = "\n".join(item.text for item in contents if isinstance(item, Text))
        kind = _ERRORS.get(observation.status, ToolErrorType.EXECUTION_ERROR)
        failure = ToolError(error_type=kind, message=message or observation.status)
        if observation.status == "sandbox_error":
            metadata = {INFRASTRUCTURE_ERROR: observation.reason or "the sandbox failed"}
    blocks = [item.block() for item in contents]
    return ToolResult(content=blocks, value=data, structured=data, error=failure, metadata=metadata)


def to_file_result(path: str, data: bytes) -> ToolResult:
    """Return the tool result of reading a file."""
    mime_type = mimetypes.guess_type(path)[0]
    file_info = {"path": path, "size": len(data)}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        encoded = {**file_info, "content_base64": base64.b64encode(data).decode("ascii")}
        item: Content = (
            Image(data, mime_type)
            if mime_type in IMAGES
            else Embedded(f"workspace:///{quote(path)}", data, mime_type or "application/octet-stream")
        )
        return ToolResult(content=[item.block()], value=encoded, structured=file_info)
    return ToolResult(content=[Text(text).block()], value=text, structured=file_info)


def _iter_contents(observation: CodeInterpreterObservation) -> Iterator[Content]:
    """Yield the contents to show to the caller, in reading order."""
    if observation.stdout:
        yield Text(observation.stdout)
    if observation.stderr:
        yield Text(f"stderr:\n{observation.stderr}")
    for output in observation.outputs:
        yield from _iter_output_contents(output)
    if observation.result is not None:
        yield Text(observation.result)
    if observation.error is not None:
        yield Text("\n".join(_error_lines(observation.error)))
    if observation.reason is not None:
        yield Text(f"{observation.status}: {observation.reason}")
    if observation.state_lost:
        yield Text("Variables and files are gone; the next call begins anew.")
    if not (
        observation.stdout
        or observation.stderr
        or observation.outputs
        or observation.result
        or observation.error
        or observation.reason
    ):
        yield Text("It ran, and printed nothing.")


def _iter_output_contents(output: Output) -> Iterator[Content]:
    for mime_type in IMAGES:
        if mime_type in output.data:
            yield Image(base64.b64decode(output.data[mime_type]), mime_type)
            return
    # The text of a last expression is shown as the result instead.
    if output.output_type == "display_data" and (text := output.data.get("text/plain")):
        yield Text(text)
