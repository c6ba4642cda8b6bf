"""The released error codes, and the errors of requests that do not validate."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from openenv_core.errors import PicklableError

INVALID_JSON: Final = "INVALID_JSON"
UNKNOWN_TYPE: Final = "UNKNOWN_TYPE"
VALIDATION_ERROR: Final = "VALIDATION_ERROR"
EXECUTION_ERROR: Final = "EXECUTION_ERROR"
CAPACITY_REACHED: Final = "CAPACITY_REACHED"
FACTORY_ERROR: Final = "FACTORY_ERROR"
SESSION_ERROR: Final = "SESSION_ERROR"
NOT_EXECUTED: Final = "NOT_EXECUTED"
"""Only in `ropewalk.v1`: the request was cancelled, or its deadline passed, before it started."""


class RefusalError(PicklableError):
    """Rejects a request with an error frame.

    Attributes:
        code: One of the codes above.
        message: What was expected, what was received, and what to do.
        extra: Further keys of the frame's data.
    """

    def __init__(self, code: str, message: str, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.extra = dict(extra or {})


MAX_FAULTS: Final = 32
"""Maximum number of validation errors to list; of more, only their number is sent."""

MAX_ECHO: Final = 1024
"""Maximum length of a request whose validation errors include the invalid values."""

MAX_TEXT: Final = 1000
"""Maximum characters of one message, and of each key in its location."""

MAX_SAID: Final = 16_384
"""Maximum characters of the text of an environment's exception."""

_MAX_DEPTH: Final = 32
_MAX_WORK: Final = 32 * 1024 * 1024
"""Maximum product of error count and request size: every error may repeat a key as long as the request."""


def faults_of(error: ValidationError, size: int) -> list[dict[str, Any]]:
    """Return validation errors as plain JSON values; `size` is the request's length."""
    count = error.error_count()
    if count > MAX_FAULTS or count * size > _MAX_WORK:
        text = f"expected a request of this server's schema, got one of {size} characters with {count} faults"
        return [{"type": "too_many_faults", "loc": [], "msg": text}]
    faults: list[dict[str, Any]] = from_json(_as_json(error, size <= MAX_ECHO))
    for fault in faults:
        fault["msg"] = short(fault["msg"])
        fault["loc"] = [short(key) if isinstance(key, str) else key for key in fault["loc"][:_MAX_DEPTH]]
    return faults


def invalid_message(faults: list[dict[str, Any]]) -> RefusalError:
    """Return the error for a request that does not validate, for these reasons."""
    return RefusalError(VALIDATION_ERROR, "Invalid message", {"errors": faults})


def _as_json(error: ValidationError, include_input: bool) -> str:
    # pydantic's JSON encoder, because `ctx` may hold a validator's ValueError.
    try:
        return error.json(include_url=False, include_input=include_input, include_context=include_input)
    except Exception:  # an input that JSON cannot hold
        return error.json(include_url=False, include_input=False)


def text_of(error: BaseException) -> str:
    """Return an exception's text, or its class's name if it has none or `str` fails, in a form that can be sent."""
    try:
        text = str(error)
    except Exception:
        text = ""
    # It may contain lone surrogates, which UTF-8 cannot encode.
    return short(text or type(error).__name__, MAX_SAID).encode("utf-8", "replace").decode("utf-8")


def short(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text, truncated to `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."
