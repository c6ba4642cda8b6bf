"""The sandbox's exceptions.

    SandboxFailureError
    ├── SandboxUnavailableError  no interpreter can start: no isolation level works, or the zygote cannot be started
    ├── SandboxClosedError       the sandbox or the session was used after close()
    ├── LimitsError              a limit is invalid, or exceeds its ceiling
    └── FileRefusedError         a path leaves the workspace; a file is missing, too large, or not a regular file

Executed code never makes a call raise: `Execution.status` reports how it ended.
"""

from openenv_core.errors import OpenEnvError


class SandboxFailureError(OpenEnvError):
    """Base class of the sandbox's exceptions."""


class SandboxUnavailableError(SandboxFailureError):
    """No interpreter can be started on this machine, or at this time."""


class SandboxClosedError(SandboxFailureError):
    """The sandbox or the session was used after `close()`."""


class LimitsError(SandboxFailureError, ValueError):
    """A limit is invalid, or exceeds its ceiling."""


class FileRefusedError(SandboxFailureError):
    """A file cannot be written, read or listed.

    Attributes:
        path: The path as given by the caller.
        reason: Why; safe to show to the author of the code.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"expected a plain file of the workspace, got {path!r}: {reason}")
        self.path = path
        self.reason = reason
