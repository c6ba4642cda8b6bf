"""The released error codes, and the exception that carries one from the decoder to the reply."""

from collections.abc import Mapping
from typing import Any, Final

INVALID_JSON: Final = "INVALID_JSON"
UNKNOWN_TYPE: Final = "UNKNOWN_TYPE"
VALIDATION_ERROR: Final = "VALIDATION_ERROR"
EXECUTION_ERROR: Final = "EXECUTION_ERROR"
CAPACITY_REACHED: Final = "CAPACITY_REACHED"
FACTORY_ERROR: Final = "FACTORY_ERROR"
SESSION_ERROR: Final = "SESSION_ERROR"


class Refusal(Exception):  # noqa: N818 - not an error of this package: it becomes an error frame
    """A request that is answered with an error frame.

    Attributes:
        code: One of the codes above.
        message: What was expected, what came, what to do.
        extra: Further keys of the frame's data.
    """

    def __init__(self, code: str, message: str, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.extra = dict(extra or {})
