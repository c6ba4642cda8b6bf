"""Stateful interpreters for untrusted code, isolated as strongly as the machine allows.

Standard library only; usable without servers and environments. docs/sandbox.md says what each isolation level
guarantees.
"""

from typing import TYPE_CHECKING, Any

from openenv_core.sandbox.config import Isolation, Limits, SandboxConfig
from openenv_core.sandbox.errors import (
    FileRefusedError,
    LimitsError,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)
from openenv_core.sandbox.results import (
    Backend,
    Branching,
    CodeError,
    Execution,
    FileInfo,
    FunctionCall,
    Interpreter,
    Interruptible,
    Output,
    Status,
    Truncated,
)
from openenv_core.sandbox.sandbox import Sandbox, SandboxSession

if TYPE_CHECKING:
    from openenv_core.sandbox.sync import SyncSandbox, SyncSession

__all__ = [
    "Backend",
    "Branching",
    "CodeError",
    "Execution",
    "FileInfo",
    "FileRefusedError",
    "FunctionCall",
    "Interpreter",
    "Interruptible",
    "Isolation",
    "Limits",
    "LimitsError",
    "Output",
    "Sandbox",
    "SandboxClosedError",
    "SandboxConfig",
    "SandboxFailureError",
    "SandboxSession",
    "SandboxUnavailableError",
    "Status",
    "SyncSandbox",
    "SyncSession",
    "Truncated",
]


def __getattr__(name: str) -> Any:
    # The synchronous classes need the client's loop thread, which nothing else here imports.
    if name in ("SyncSandbox", "SyncSession"):
        from openenv_core.sandbox import sync

        return getattr(sync, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
