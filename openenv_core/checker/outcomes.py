"""What a check looks at, and the ways in which it can come out other than well."""

from enum import StrEnum

from openenv_core.errors import ClientError, OpenEnvError


class Level(StrEnum):
    """What a check looks at, from what costs least to what costs most."""

    STATIC = "static"
    RUNTIME = "runtime"
    SEMANTIC = "semantic"
    HOSTILE = "hostile"
    LOAD = "load"


class CheckFailed(OpenEnvError):  # noqa: N818 - says what happened, as the tree of errors does
    """The property does not hold.

    Args:
        message: What was expected and what came.
        change: What the author should change.
        cause: What many checks fail of alike, and is told once; the message by default.
    """

    def __init__(self, message: str, *, change: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.change = change
        self.cause = cause or message


def cause_of(error: ClientError) -> str:
    """Return what tells whether two checks met the same error of a server."""
    return f"{type(error).__name__}: {error}"


class CheckWarned(OpenEnvError):  # noqa: N818 - likewise
    """The property holds as far as it was seen, and is doubtful.

    Args:
        message: What was expected and what came.
        change: What the author should look at.
    """

    def __init__(self, message: str, *, change: str) -> None:
        super().__init__(message)
        self.message = message
        self.change = change


class NotApplicable(OpenEnvError):  # noqa: N818 - says what happened, as the tree of errors does
    """The property cannot be looked at here: a URL has no Dockerfile, for one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
