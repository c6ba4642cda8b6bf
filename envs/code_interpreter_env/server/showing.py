"""What an interpreter's callers of tools are shown: text, images and documents; and the same as data."""

import base64
import mimetypes
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import quote

from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.sandbox import Output
from openenv_core.tools import Content, Embedded, Image, Text, ToolError, ToolErrorType, ToolResult

from ..models import CodeInterpreterObservation

IMAGES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What callers can be expected to show."""

_ERRORS: Final = {"timeout": ToolErrorType.TIMEOUT, "sandbox_error": ToolErrorType.TRANSPORT_ERROR}


def run_result(seen: CodeInterpreterObservation) -> ToolResult:
    """Return what a run of code is told as."""
    shown = list(_shown(seen))
    error = seen.error
    data: dict[str, Any] = {
        "status": seen.status,
        "stdout": seen.stdout,
        "stderr": seen.stderr,
        "result": seen.result,
        "exit_code": seen.exit_code,
        "error": None if error is None else asdict(error),
        "reason": seen.reason,
        "state_lost": seen.state_lost,
        "truncated": asdict(seen.truncated),
        "files": [asdict(file) for file in seen.files],
    }
    failure, metadata = None, {}
    if seen.status != "ok":
        words = "\n".join(part.text for part in shown if isinstance(part, Text))
        kind = _ERRORS.get(seen.status, ToolErrorType.EXECUTION_ERROR)
        failure = ToolError(error_type=kind, message=words or seen.status)
        if seen.status == "sandbox_error":
            metadata = {INFRASTRUCTURE_ERROR: seen.reason or "the sandbox failed"}
    blocks = [part.block() for part in shown]
    return ToolResult(content=blocks, value=data, structured=data, error=failure, metadata=metadata)


def file_result(path: str, data: bytes) -> ToolResult:
    """Return what a file that was read is told as."""
    mime_type = mimetypes.guess_type(path)[0]
    about = {"path": path, "size": len(data)}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        encoded = {**about, "content_base64": base64.b64encode(data).decode("ascii")}
        part: Content = (
            Image(data, mime_type)
            if mime_type in IMAGES
            else Embedded(f"workspace:///{quote(path)}", data, mime_type or "application/octet-stream")
        )
        return ToolResult(content=[part.block()], value=encoded, structured=about)
    return ToolResult(content=[Text(text).block()], value=text, structured=about)


def _shown(seen: CodeInterpreterObservation) -> Iterator[Content]:
    """Yield what a reader is shown, in the order in which it makes sense."""
    if seen.stdout:
        yield Text(seen.stdout)
    if seen.stderr:
        yield Text(f"stderr:\n{seen.stderr}")
    for output in seen.outputs:
        yield from _pictures_and_words(output)
    if seen.result is not None:
        yield Text(seen.result)
    if seen.error is not None:
        lines = [line.removesuffix("\n") for line in seen.error.traceback]
        yield Text("\n".join(lines) or f"{seen.error.ename}: {seen.error.evalue}")
    if seen.reason is not None:
        yield Text(f"{seen.status}: {seen.reason}")
    if seen.state_lost:
        yield Text("Variables and files are gone; the next call begins anew.")
    if not (seen.stdout or seen.stderr or seen.outputs or seen.result or seen.error or seen.reason):
        yield Text("It ran, and printed nothing.")


def _pictures_and_words(output: Output) -> Iterator[Content]:
    for mime_type in IMAGES:
        if mime_type in output.data:
            yield Image(base64.b64decode(output.data[mime_type]), mime_type)
            return
    # The words of a last expression are its result's.
    if output.output_type == "display_data" and (words := output.data.get("text/plain")):
        yield Text(words)
