"""Running code that nobody has read: interpreters with state, behind as many walls as the machine has.

Standard library only; usable without servers and environments. docs/sandbox.md says what each level guarantees.
"""

from openenv_core.sandbox.config import SandboxConfig
from openenv_core.sandbox.errors import (
    FileRefused,
    LimitsError,
    SandboxClosed,
    SandboxFailure,
    SandboxUnavailable,
)
from openenv_core.sandbox.interpreter import Backend, Interpreter
from openenv_core.sandbox.levels import Isolation
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.results import Call, CodeError, Execution, FileInfo, Output, Status, Truncated
from openenv_core.sandbox.sandbox import Sandbox
from openenv_core.sandbox.session import Session
from openenv_core.sandbox.sync import SyncSandbox, SyncSession

__all__ = [
    "Backend",
    "Call",
    "CodeError",
    "Execution",
    "FileInfo",
    "FileRefused",
    "Interpreter",
    "Isolation",
    "Limits",
    "LimitsError",
    "Output",
    "Sandbox",
    "SandboxClosed",
    "SandboxConfig",
    "SandboxFailure",
    "SandboxUnavailable",
    "Session",
    "Status",
    "SyncSandbox",
    "SyncSession",
    "Truncated",
]
