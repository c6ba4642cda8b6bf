"""Every error that the sandbox raises, as one tree.

    SandboxFailureError
    ├── SandboxUnavailableError  no interpreter can be had: no rung of the ladder holds, or the zygote cannot be started
    ├── SandboxClosedError       the sandbox or the session was used after close()
    ├── LimitsError              a limit that makes no sense, or exceeds its ceiling
    └── FileRefusedError         a path that leaves the workspace, a file that is missing, too large, or no plain file

What code does never raises: it is told by `Execution.status`.
"""

from openenv_core.errors import OpenEnvError


class SandboxFailureError(OpenEnvError):
    """The base of the sandbox's errors."""


class SandboxUnavailableError(SandboxFailureError):
    """No interpreter can be had here, or not now."""


class SandboxClosedError(SandboxFailureError):
    """The sandbox or the session was used after `close()`."""


class LimitsError(SandboxFailureError, ValueError):
    """A limit that makes no sense, or exceeds its ceiling."""


class FileRefusedError(SandboxFailureError):
    """A file cannot be put, read or listed.

    Attributes:
        path: As it was asked for.
        reason: Why, in words that may be shown to the one whose code it is.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"expected a plain file of the workspace, got {path!r}: {reason}")
        self.path = path
        self.reason = reason
