"""Typed text turned into the value of a field."""

import json
import math
import re
from typing import Any, Final

from openenv_core.play.form import FormField, as_text

_TRUE: Final = ("true", "t", "yes", "y", "1")
_FALSE: Final = ("false", "f", "no", "n", "0")
_OF_PYTHON: Final = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


def value_of(field: FormField, text: str) -> Any:
    """Return the value that a text stands for.

    Raises:
        ValueError: It stands for none that the field can have; the message says what would.
    """
    text = text.strip()
    if field.choices:
        return _choice(field, text)
    if field.nullable and text == "null":
        return None
    value = _read(field.kind, field.item, text)
    _within(field, value)
    return value


def _read(kind: str, item: str, text: str) -> Any:
    if kind == "string":
        return _string(text)
    if kind == "boolean":
        return _boolean(text)
    if kind in ("integer", "number"):
        return _number(kind, text)
    if kind == "array" and not text.startswith("["):
        return [_read(item, "any", part) for part in re.split(r"[,\s]+", text) if part]
    if kind == "any":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return _json(kind, text)


def _choice(field: FormField, text: str) -> Any:
    if field.nullable and text == "null":
        return None
    if field.kind == "boolean":
        return _boolean(text)
    asked = text.strip("\"'").lower()
    texts = [as_text(choice) for choice in field.choices]
    for same in (
        [at for at, name in enumerate(texts) if name == text.strip("\"'")],
        [at for at, name in enumerate(texts) if name.lower() == asked],
        [at for at, name in enumerate(texts) if asked and name.lower().startswith(asked)],
    ):
        if len(same) == 1:
            return field.choices[same[0]]
    raise ValueError(f"expected one of {', '.join(texts)}, got {text!r}")


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def _number(kind: str, text: str) -> int | float:
    try:
        if kind == "integer":
            return int(text)
        value = float(text)
    except ValueError:
        raise ValueError(f"expected {_OF_PYTHON[kind]}, got {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"expected a number that JSON can carry, got {text}")
    return value


def _string(text: str) -> str:
    """Return a text; in double quotes it is read as JSON, for empty ones and those of several lines."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            pass
    return text


def _json(kind: str, text: str) -> Any:
    wanted = "a JSON object" if kind == "object" else "a JSON list"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected {wanted}, got {text!r}: {error}") from None
    if not isinstance(value, dict if kind == "object" else list):
        raise ValueError(f"expected {wanted}, got {text!r}")
    return value


def _within(field: FormField, value: Any) -> None:
    """Check what can be said here; all the rest is the server's to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = field.schema.get("minimum"), field.schema.get("maximum")
    if (isinstance(low, int | float) and value < low) or (isinstance(high, int | float) and value > high):
        raise ValueError(f"expected {field.label}, got {value}")
