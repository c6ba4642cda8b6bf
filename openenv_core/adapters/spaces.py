"""Gymnasium's spaces and their values as JSON.

A model's field that holds values of a space describes it in its JSON schema, under `gymnasium_space`: an object with a
`type` and the arguments of the space's constructor, in which null is an infinite bound. A value is JSON as of numpy's
`tolist()`; of a uint8 Box (an image), base64 of its C-ordered bytes.
"""

import base64
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from openenv_core.errors import ConfigurationError


def describe_space(space: Space[Any]) -> dict[str, Any]:
    """Return a space as JSON.

    Raises:
        ConfigurationError: Spaces of its type are not supported (Graph, or a custom class).
    """
    kind = type(space).__name__
    match space:
        case spaces.Box():
            return {
                "type": kind,
                "low": _bounds(space.low),
                "high": _bounds(space.high),
                "shape": list(space.shape),
                "dtype": str(space.dtype),
            }
        case spaces.Discrete():
            return {"type": kind, "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            return {
                "type": kind,
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": str(space.dtype),
            }
        case spaces.MultiBinary():
            return {"type": kind, "n": space.n if isinstance(space.n, int) else list(space.n)}
        case spaces.Text():
            return {
                "type": kind,
                "min_length": space.min_length,
                "max_length": space.max_length,
                "charset": space.characters,
            }
        case spaces.Tuple() | spaces.OneOf():
            return {"type": kind, "spaces": [describe_space(subspace) for subspace in space.spaces]}
        case spaces.Dict():
            return {
                "type": kind,
                "spaces": {key: describe_space(subspace) for key, subspace in space.spaces.items()},
            }
        case spaces.Sequence():
            return {"type": kind, "space": describe_space(space.feature_space), "stack": space.stack}
    raise ConfigurationError(f"a space of type {kind} cannot cross the wire; wrap the environment")


def read_space(data: Mapping[str, Any]) -> Space[Any]:
    """Return the space of a JSON description.

    Raises:
        ConfigurationError: The description is invalid.
    """
    spec = dict(data)
    kind = spec.pop("type", None)
    try:
        match kind:
            case "Box":
                dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
                low, high = (_read_bounds(spec[end], fill, shape, dtype) for end, fill in _ENDS)
                return spaces.Box(low, high, shape, dtype.type)
            case "Discrete":
                return spaces.Discrete(spec["n"], start=spec["start"], dtype=np.dtype(spec["dtype"]).type)
            case "MultiDiscrete":
                nvec, start = np.array(spec["nvec"]), np.array(spec["start"])
                return spaces.MultiDiscrete(nvec, np.dtype(spec["dtype"]).type, start=start)
            case "MultiBinary":
                return spaces.MultiBinary(spec["n"])
            case "Text":
                return spaces.Text(**spec)
            case "Tuple":
                return spaces.Tuple([read_space(description) for description in spec["spaces"]])
            case "OneOf":
                return spaces.OneOf([read_space(description) for description in spec["spaces"]])
            case "Dict":
                return spaces.Dict(
                    {key: read_space(description) for key, description in spec["spaces"].items()}
                )
            case "Sequence":
                return spaces.Sequence(read_space(spec["space"]), stack=spec["stack"])
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"this describes no space of Gymnasium: {data!r:.300}: {error}") from error
    raise ConfigurationError(f"this describes no space of Gymnasium's: {data!r:.300}")


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


def has_bytes(space: Space[Any]) -> bool:
    """Whether values of a space have bytes as base64 in JSON: those of a uint8 Box, also as a part."""
    parts = getattr(space, "spaces", ())
    if any(map(has_bytes, parts.values() if isinstance(parts, Mapping) else parts)):
        return True
    return isinstance(space, spaces.Box) and space.dtype == np.uint8


_ENDS: Final = (("low", -math.inf), ("high", math.inf))


def _bounds(bounds: "np.ndarray[Any, Any]") -> Any:
    """Return bounds as nested lists, or as one number if all are equal; None for infinite bounds."""
    equal = bounds.size > 0 and bool((bounds == bounds.flat[0]).all())
    return _replace_infinity((bounds.flat[0] if equal else bounds).tolist())


def _replace_infinity(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_infinity(item) for item in value]
    return value if math.isfinite(value) else None


def _read_bounds(
    bounds: Any, fill: float, shape: tuple[int, ...], dtype: "np.dtype[Any]"
) -> "np.ndarray[Any, Any]":
    filled = np.array(bounds, dtype=object)
    filled[filled == None] = fill  # noqa: E711 - element by element
    return np.broadcast_to(filled.astype(dtype), shape).copy()
