"""What goes wrong between us and whoever runs the code."""

from openenv_core.sandbox import SandboxFailure


class HostFailure(SandboxFailure):
    """The service, the gateway or the container failed; the code had no part in it.

    Attributes:
        state_lost: Whether the interpreter is gone with it.
    """

    def __init__(self, message: str, *, state_lost: bool = False) -> None:
        super().__init__(message)
        self.state_lost = state_lost


class Unanswered(HostFailure):
    """Our own code ran in the interpreter and said nothing that we understand: the session's code may be why."""
