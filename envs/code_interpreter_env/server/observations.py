"""From executions to observations, in the full shape and in the released one."""

import base64
from dataclasses import asdict, fields
from typing import Any, Final

from openenv_core.sandbox import CodeError, Execution, FileRefused
from openenv_core.sandbox.results import EXIT_ERROR, EXIT_SANDBOX

from ..models import EXECUTION, CodeInterpreterObservation, CodeObservation, FileContent

_FIELDS: Final = tuple(field.name for field in fields(Execution))
_RELEASED: Final = ("stdout", "stderr", "exit_code")
_BESIDE: Final = tuple(name for name in _FIELDS if name not in _RELEASED)

LAST_CODE: Final = "last_code"
"""The key under which released coding environments repeat the code."""


def full(execution: Execution, **fields: Any) -> CodeInterpreterObservation:
    """Return an execution as an observation of ours. Its values are checked already, where they come from.

    Args:
        execution: What happened.
        fields: Further fields of the observation.
    """
    return CodeInterpreterObservation.model_construct(
        **{name: getattr(execution, name) for name in _FIELDS}, **fields
    )


def released(execution: Execution, code: str | None) -> CodeObservation:
    """Return an execution as released clients read it, which refuse any key of ours.

    They have no other place to look than stderr: the traceback, and why code did not end by itself, are there too.

    Args:
        execution: What happened; what has no field there goes below `metadata["execution"]`.
        code: What was run; None after a reset.
    """
    rest = {name: _plain(getattr(execution, name)) for name in _BESIDE}
    if (stderr := _in_words(execution)) != execution.stderr:
        rest["stderr"] = execution.stderr
    metadata = {EXECUTION: rest} if code is None else {LAST_CODE: code, EXECUTION: rest}
    return CodeObservation.model_construct(
        stdout=execution.stdout, stderr=stderr, exit_code=execution.exit_code, metadata=metadata
    )


def content_of(path: str, data: bytes) -> FileContent:
    """Return a file as it crosses the wire."""
    return FileContent.model_construct(
        path=path, size=len(data), content_base64=base64.b64encode(data).decode("ascii")
    )


def refused(error: FileRefused, **known: Any) -> Execution:
    """Return what a policy sees that asked for a file which cannot be had: an error of its own."""
    told = CodeError(ename="FileRefused", evalue=str(error))
    return Execution(
        status="error", exit_code=EXIT_ERROR, error=told, stderr=f"FileRefused: {error}\n", **known
    )


def without_task() -> Execution:
    """Return what a policy sees that submits where there is no task."""
    told = CodeError(
        ename="NoTask", evalue="expected a task to submit a solution of, got an episode without one"
    )
    return Execution(status="error", exit_code=EXIT_ERROR, error=told, stderr=f"NoTask: {told.evalue}\n")


def failed(reason: str, **known: Any) -> Execution:
    """Return what is seen of a failure of the infrastructure, which is nobody's code's."""
    return Execution(status="sandbox_error", exit_code=EXIT_SANDBOX, reason=reason, **known)


def _in_words(execution: Execution) -> str:
    error, told = execution.error, []
    if error is not None:
        told += [line.removesuffix("\n") for line in error.traceback] or [f"{error.ename}: {error.evalue}"]
    if execution.reason is not None:
        told.append(execution.reason)
    if not told:
        return execution.stderr
    printed = [execution.stderr.removesuffix("\n")] if execution.stderr else []
    return "\n".join([*printed, *told, ""])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(entry) for entry in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
