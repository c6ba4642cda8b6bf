"""Gymnasium's spaces: of a model's fields, declared or derived from their JSON schemas, and as JSON.

A model's field that holds values of a space describes it in its JSON schema, under `gymnasium_space`: an object with a
`type` and the arguments of the space's constructor, in which null is an infinite bound. A value is JSON as of numpy's
`tolist()`; of a uint8 Box (an image), base64 of its C-ordered bytes.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from pydantic import JsonValue

from openenv_core.adapters.episode import resolve
from openenv_core.errors import ConfigurationError
from openenv_core.pictures import PNG, Picture
from openenv_core.protocol.batch import SPACE, layout_of

SEAT_SPACES: Final = "seat_spaces"
"""Key of a field's JSON schema where the seats of a game have different spaces: the description of each, by seat."""

MAX_TEXT_CHARS: Final = 1 << 20

_INTEGERS: Final = np.iinfo(np.int64)


class Fields:
    """The fields of a model that form its space: those that declare a space, else all.

    Args:
        schema: The model's JSON schema.
        seat: The seat whose spaces are read, in a game of several.

    Attributes:
        space: The space: that of a single field, or a Dict of all fields' spaces by name.
        single: Name of the single field; None if there are several.
        parts: The fields by name.
        layouts: Layouts in batches of the actions' fields that may be sent as arrays, by name.

    Raises:
        ConfigurationError: The model has no fields of its own.
    """

    def __init__(self, schema: Mapping[str, Any], seat: str | None = None) -> None:
        definitions = schema.get("$defs", {})
        properties = {
            name: _resolve_parts(field, definitions)
            for name, field in schema.get("properties", {}).items()
            if name not in ("metadata", "done", "reward", "terminated", "truncated")
        }
        properties |= {
            name: {**field, SPACE: field[SEAT_SPACES][seat]}
            for name, field in properties.items()
            if seat in field.get(SEAT_SPACES, ())
        }
        declared = {name: read_space(field[SPACE]) for name, field in properties.items() if SPACE in field}
        self.parts: dict[str, FieldSpace] = (
            {name: FieldSpace.declared(space, properties[name]) for name, space in declared.items()}
            if declared
            else {name: FieldSpace.derived(field) for name, field in properties.items()}
        )
        if not self.parts:
            raise ConfigurationError("the environment's model has no field of its own to make a space of")
        field_spaces = {name: field.space for name, field in self.parts.items()}
        # The JSON of a uint8 Box is no list of numbers, so that the server cannot make it from an array.
        layouts = {
            name: None if has_bytes(space) else layout_of(properties[name].get(SPACE, {}))
            for name, space in field_spaces.items()
        }
        self.layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self.single = next(iter(field_spaces)) if len(field_spaces) == 1 else None
        self.space = field_spaces[self.single] if self.single else spaces.Dict(field_spaces)

    def read(self, fields: Mapping[str, Any]) -> Any:
        """Decode a value of the space from the model's fields as JSON."""
        if self.single:
            return self.parts[self.single].read(fields[self.single])
        return {name: field.read(fields.get(name)) for name, field in self.parts.items()}

    def write(self, value: Any) -> dict[str, Any]:
        """Encode a value of the space as the model's fields in JSON."""
        if self.single:
            return {self.single: self.parts[self.single].write(value)}
        return {name: field.write(value[name]) for name, field in self.parts.items()}


class FieldSpace(NamedTuple):
    """A field with its space and the conversion of its values from and to JSON.

    Attributes:
        space: Space of the field's values.
        read: Decodes a value from JSON.
        write: Encodes a value as JSON.
    """

    space: Space[Any]
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]

    @classmethod
    def declared(cls, space: Space[Any], schema: Mapping[str, Any] | None = None) -> Self:
        """Return the field of a declared space; its JSON schema tells a picture from plain bytes."""
        if schema is not None and schema.get("contentMediaType") == PNG and space.shape is not None:
            picture = Picture(*space.shape)
            return cls(space, picture.read, picture.write)
        return cls(space, lambda value: read_value(space, value), lambda value: write_value(space, value))

    @classmethod
    def derived(cls, schema: Mapping[str, Any]) -> Self:
        """Return the field with a space derived from its JSON schema."""
        kinds = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
        if len(kinds) == 1 and kinds[0] is not schema:
            if choices := _choices_of(kinds[0]):
                return cls._discrete([None, *choices])
            # Any other nullable field becomes a text space, in which "" stands for null.
            return cls._text(empty_is_null=True)
        if choices := _choices_of(schema):
            return cls._discrete(choices)
        if schema.get("type") == "array" and (choices := _choices_of(schema.get("items", {}))):
            item = cls._discrete(choices)
            return cls(
                spaces.Sequence(item.space),
                lambda value: tuple(map(item.read, value)),
                lambda value: list(map(item.write, value)),
            )
        low, high = schema.get("minimum"), schema.get("maximum")
        match schema.get("type"):
            case "boolean":
                return cls(spaces.Discrete(2), lambda value: np.int64(bool(value)), bool)
            case "integer":
                if low is not None and high is not None and max(-low, high, high - low) < _INTEGERS.max:
                    return cls.declared(spaces.Discrete(high - low + 1, start=low))
                return cls.declared(_box(low, high, np.int64))
            case "number":
                return cls.declared(_box(low, high, np.float64))
        return cls._text()

    @classmethod
    def _discrete(cls, choices: Sequence[Any]) -> Self:
        return cls(
            spaces.Discrete(len(choices)),
            lambda value: np.int64(choices.index(value)),
            lambda value: choices[int(value)],
        )

    @classmethod
    def _text(cls, *, empty_is_null: bool = False) -> Self:
        def read(value: Any) -> str:
            if value is None:
                return ""
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return cls(
            AnyText(MAX_TEXT_CHARS, min_length=0),
            read,
            lambda value: value or None if empty_is_null else value,
        )


class AnyText(spaces.Text):
    """A text space with any characters; samples consist of letters and digits."""

    def contains(self, x: Any) -> bool:
        """Whether `x` is text of at most `max_length` characters."""
        return isinstance(x, str) and len(x) <= self.max_length


def _resolve_parts(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve the `$ref` of a field's schema, and those of its options and items."""
    resolved = dict(resolve(schema, definitions))
    if "anyOf" in resolved:
        resolved["anyOf"] = [resolve(option, definitions) for option in resolved["anyOf"]]
    if "items" in resolved:
        resolved["items"] = resolve(resolved["items"], definitions)
    return resolved


def _choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a JSON schema lists; none if it lists none."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _box(low: float | None, high: float | None, dtype: type[np.int64 | np.float64]) -> Space[Any]:
    # Without the highest integer: Gymnasium draws samples below the bound plus one, which would overflow.
    lowest, highest = (_INTEGERS.min, _INTEGERS.max - 1) if dtype is np.int64 else (-np.inf, np.inf)
    low, high = lowest if low is None else max(low, lowest), highest if high is None else min(high, highest)
    return spaces.Box(low, high, (), dtype)


_ARGUMENTS: Final = {
    "Box": ("low", "high", "shape", "dtype"),
    "Discrete": ("n", "start", "dtype"),
    "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
    "Text": ("min_length", "max_length", "charset"),
    "Tuple": ("spaces",),
    "OneOf": ("spaces",),
    "Dict": ("spaces",),
    "Sequence": ("space", "stack"),
}
"""By type of space: the arguments of its constructor that its description has."""

_ATTRIBUTES: Final = {"charset": "characters", "space": "feature_space"}
"""Attributes that have other names than the arguments."""


def describe_space(space: Space[Any]) -> dict[str, Any]:
    """Return a space as JSON.

    Raises:
        ConfigurationError: Spaces of its type are not supported (Graph, or a custom class).
    """
    kind = type(space).__name__
    if kind not in _ARGUMENTS:
        raise ConfigurationError(f"a space of type {kind} cannot cross the wire; wrap the environment")
    arguments = {name: getattr(space, _ATTRIBUTES.get(name, name)) for name in _ARGUMENTS[kind]}
    if isinstance(space, spaces.Box):
        arguments |= {"low": _bounds(space.low), "high": _bounds(space.high)}
    return {"type": kind, **{name: _describe_argument(value) for name, value in arguments.items()}}


def _describe_argument(value: Any) -> Any:
    match value:
        case Space():
            return describe_space(value)
        case Mapping():
            return {key: describe_space(subspace) for key, subspace in value.items()}
        case tuple():
            return [_describe_argument(item) for item in value]
        case np.dtype():
            return str(value)
        case np.ndarray() | np.generic():
            return value.tolist()
    return value


def read_space(data: Mapping[str, Any]) -> Space[Any]:
    """Return the space of a JSON description.

    Raises:
        ConfigurationError: The description is invalid.
    """
    try:
        kind = data["type"]
        spec = {name: data[name] for name in _ARGUMENTS[kind]}
        if kind == "Box":
            dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
            low, high = (_read_bounds(spec[end], fill, shape, dtype) for end, fill in _ENDS)
            return spaces.Box(low, high, shape, dtype.type)
        arguments = {name: _read_argument(name, value) for name, value in spec.items()}
        space: Space[Any] = getattr(spaces, kind)(**arguments)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"this describes no space of Gymnasium: {data!r:.300}: {error}") from error
    return space


def _read_argument(name: str, value: Any) -> Any:
    match name, value:
        case "dtype", _:
            return np.dtype(value).type
        case "space", _:
            return read_space(value)
        case "spaces", Mapping():
            return {key: read_space(description) for key, description in value.items()}
        case "spaces", _:
            return [read_space(description) for description in value]
        case (("nvec" | "start"), list()):
            return np.array(value)
    return value


def write_value(space: Space[Any], value: Any) -> Any:
    """Encode a value of a space as JSON."""
    match space:
        case spaces.Box() if space.dtype == np.uint8:
            return base64.b64encode(np.ascontiguousarray(value, dtype=np.uint8).tobytes()).decode()
        case spaces.Tuple():
            return [write_value(subspace, item) for subspace, item in zip(space.spaces, value, strict=True)]
        case spaces.OneOf():
            return [int(value[0]), write_value(space.spaces[value[0]], value[1])]
        case spaces.Dict():
            return {key: write_value(subspace, value[key]) for key, subspace in space.spaces.items()}
        case spaces.Sequence():
            items = iterate(space.stacked_feature_space, value) if space.stack else value
            return [write_value(space.feature_space, item) for item in items]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def read_value(space: Space[Any], value: Any) -> Any:
    """Decode a value of a space from JSON.

    Raises:
        ValueError: The JSON does not fit the space; its bounds are not checked.
    """
    try:
        match space:
            case spaces.Box() if space.dtype == np.uint8:
                return (
                    np.frombuffer(base64.b64decode(value, validate=True), np.uint8)
                    .reshape(space.shape)
                    .copy()
                )
            case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
                return np.asarray(value, dtype=space.dtype).reshape(space.shape)
            case spaces.Discrete():
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{value!r:.80} is no integer")
                return space.dtype.type(value)
            case spaces.Text():
                return str(value)
            case spaces.Tuple():
                return tuple(
                    read_value(subspace, item) for subspace, item in zip(space.spaces, value, strict=True)
                )
            case spaces.OneOf():
                return np.int64(value[0]), read_value(space.spaces[value[0]], value[1])
            case spaces.Dict():
                return {key: read_value(subspace, value[key]) for key, subspace in space.spaces.items()}
            case spaces.Sequence():
                items = tuple(read_value(space.feature_space, item) for item in value)
                if not space.stack:
                    return items
                empty: Any = create_empty_array(space.feature_space, len(items))
                return concatenate(space.feature_space, items, empty)
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{value!r:.200} is no value of {space} ({error})") from error
    raise ValueError(f"values of {space} cannot cross the wire")


def encodable_info(info: Mapping[Any, Any]) -> dict[str, JsonValue]:
    """Return the entries of an environment's `info` that JSON can hold; arrays as lists."""
    kept: dict[str, JsonValue] = {}
    for key, value in info.items():
        plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        with suppress(TypeError, ValueError):
            json.dumps(plain)
            kept[str(key)] = plain
    return kept


def has_bytes(space: Space[Any]) -> bool:
    """Whether values of a space have bytes as base64 in JSON: those of a uint8 Box, also as a part."""
    parts = getattr(space, "spaces", ())
    if any(map(has_bytes, parts.values() if isinstance(parts, Mapping) else parts)):
        return True
    return isinstance(space, spaces.Box) and space.dtype == np.uint8


_ENDS: Final = (("low", -math.inf), ("high", math.inf))


def _bounds(bounds: "np.ndarray[Any, Any]") -> Any:
    """Return bounds as nested lists, or as one number if all are equal; None for infinite bounds."""
    finite = np.where(np.isfinite(bounds), bounds, np.array(None))
    equal = bounds.size > 0 and bool((bounds == bounds.flat[0]).all())
    return finite.flat[0] if equal else finite.tolist()


def _read_bounds(
    bounds: Any, fill: float, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> "np.ndarray[Any, Any]":
    filled = np.array(bounds, dtype=object)
    filled[filled == None] = fill  # noqa: E711 - element by element
    return np.broadcast_to(filled.astype(dtype), shape).copy()
