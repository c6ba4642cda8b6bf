"""Stateful interpreters for untrusted code, isolated as strongly as the machine allows.

Standard library only; usable without servers and environments. docs/sandbox.md says what each isolation level
guarantees.
"""

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
    "Truncated",
]
