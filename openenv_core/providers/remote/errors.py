"""What goes wrong with hosted sandboxes.

    ProviderError
    └── SandboxError
        ├── SandboxServiceUnavailable   the service does not answer, or answers with a fault of its own
        ├── SandboxRefused              it understood the request and says no
        │   ├── SandboxAccessRefused    a token is missing, unknown, or not enough (401, 403)
        │   └── SandboxLimitReached     it has no room for another sandbox now (429)
        └── SandboxLost                 the sandbox is gone: ended, or its lease ran out

A sandbox whose server does not become healthy is a `ServerStartFailed`, as everywhere.
"""

# ruff: noqa: N818 - named as the rest of the tree is: for what happened

from openenv_core.errors import ProviderError


class SandboxError(ProviderError):
    """Something is wrong with a hosted sandbox or its service."""


class SandboxServiceUnavailable(SandboxError):
    """The service cannot be reached, does not answer in time, or does not speak the interface."""


class SandboxRefused(SandboxError):
    """The service said no.

    Attributes:
        status: The HTTP status.
        code: The service's word for the reason, `image_not_found` for one; empty where it gave none.
    """

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class SandboxAccessRefused(SandboxRefused):
    """The token is missing or unknown, or does not allow what was asked for."""


class SandboxLimitReached(SandboxRefused):
    """The service has no room for another sandbox.

    Attributes:
        retry_after_s: Seconds until it is worth another try, where the service said so.
    """

    def __init__(
        self, message: str, status: int = 429, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status, code)
        self.retry_after_s = retry_after_s


class SandboxLost(SandboxError):
    """The sandbox is no longer there."""
