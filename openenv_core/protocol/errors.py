"""The released error codes, and what is told of a request that does not validate."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

INVALID_JSON: Final = "INVALID_JSON"
UNKNOWN_TYPE: Final = "UNKNOWN_TYPE"
VALIDATION_ERROR: Final = "VALIDATION_ERROR"
EXECUTION_ERROR: Final = "EXECUTION_ERROR"
CAPACITY_REACHED: Final = "CAPACITY_REACHED"
FACTORY_ERROR: Final = "FACTORY_ERROR"
SESSION_ERROR: Final = "SESSION_ERROR"
NOT_EXECUTED: Final = "NOT_EXECUTED"
"""Of `ropewalk.v1` alone: the request was cancelled, or its deadline was over, before it had begun."""


class RefusalError(Exception):
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


MAX_FAULTS: Final = 32
"""Of more faults only their number is told."""

MAX_ECHO: Final = 1024
"""Characters of a request whose faults are told with the values that were found; of a longer one without."""

MAX_TEXT: Final = 1000
"""Characters of one message, and of anything that it names."""

MAX_SAID: Final = 16_384
"""Characters of what an exception of the environment says."""

_MAX_DEPTH: Final = 32
_MAX_WORK: Final = 32 * 1024 * 1024
"""The greatest product of faults and size: every fault may repeat a key as long as the request."""


def faults_of(error: ValidationError, size: int) -> list[dict[str, Any]]:
    """Return the faults as plain JSON values."""
    count = error.error_count()
    if count > MAX_FAULTS or count * size > _MAX_WORK:
        text = f"expected a request of this server's schema, got one of {size} characters with {count} faults"
        return [{"type": "too_many_faults", "loc": [], "msg": text}]
    found: list[dict[str, Any]] = from_json(_as_json(error, size <= MAX_ECHO))
    for fault in found:
        fault["msg"] = short(fault["msg"])
        fault["loc"] = [short(key) if isinstance(key, str) else key for key in fault["loc"][:_MAX_DEPTH]]
    return found


def _as_json(error: ValidationError, whole: bool) -> str:
    # pydantic's own JSON form, because a validator's ValueError in `ctx` is not plain.
    try:
        return error.json(include_url=False, include_input=whole, include_context=whole)
    except Exception:  # an input that cannot be written
        return error.json(include_url=False, include_input=False)


def text_of(error: BaseException) -> str:
    """Return what an exception says, as text that can be sent: whatever it says, and where saying it fails."""
    try:
        text = str(error)
    except Exception:
        text = ""
    # It can hold lone surrogates, which UTF-8 cannot.
    return short(text or type(error).__name__, MAX_SAID).encode("utf-8", "replace").decode("utf-8")


def short(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text, or the beginning of a long one."""
    return text if len(text) <= limit else f"{text[:limit]}..."
