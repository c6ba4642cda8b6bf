"""JSON encoding of the wire: NaN and infinities become null; arrays and bytes are supported."""

from collections.abc import Callable
from threading import Lock
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import from_json, to_json

__all__ = ["dumps", "from_json", "reader", "to_plain"]

_build_lock: Final = Lock()


def to_plain(value: Any) -> Any:
    """Convert arrays and scalars of numpy, torch etc., which pydantic cannot serialise.

    Raises:
        TypeError: The value has no plain form.
    """
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return tolist()
    raise TypeError(
        f"expected a value that JSON can hold, got {type(value).__name__}; "
        "convert it to numbers, text, lists or dicts before it leaves the environment"
    )


def dumps(value: Any) -> bytes:
    """Encode any value as JSON; models use their own serialisation settings."""
    return to_json(value, fallback=to_plain, inf_nan_mode="null", bytes_mode="base64")


def reader(model: type[BaseModel]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that validates parsed JSON into `model`.

    It validates Python values, which is fast, unless the model has fields that need pydantic's JSON mode: bytes
    (base64 text on the wire) and strict fields (such as a date as text).
    """
    with _build_lock:  # older pydantic must not build a model in two threads at once
        model.model_rebuild(raise_errors=False)  # if it has not been needed until now
    validator = model.__pydantic_validator__
    if not _needs_json_mode(model.__pydantic_core_schema__):
        return validator.validate_python
    return lambda value: validator.validate_json(dumps(value))


def _needs_json_mode(schema: Any) -> bool:
    if isinstance(schema, dict):
        if schema.get("type") == "bytes" or schema.get("strict") is True:
            return True
        return any(_needs_json_mode(part) for key, part in schema.items() if key != "cls")
    if isinstance(schema, (list, tuple)):
        return any(_needs_json_mode(part) for part in schema)
    return False
