"""Between Gymnasium's spaces and JSON: arrays are lists, tuples are lists, numpy's numbers are plain ones."""

from collections.abc import Mapping
from typing import Any

import numpy
from gymnasium import Space, spaces

from openenv_core.errors import EnvironmentFailureError


def to_json(value: Any) -> Any:
    """Return a value of a space as JSON has it."""
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(space: Space[Any], value: Any) -> Any:
    """Return what a space takes for a value that came as JSON.

    Raises:
        EnvironmentFailureError: The space does not take it.
    """
    try:
        converted = _read(space, value)
        valid = space.contains(converted)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise EnvironmentFailureError(
            f"expected an action of {space}, got {str(value)[:200]}: {error}"
        ) from error
    if not valid:
        raise EnvironmentFailureError(f"expected an action of {space}, got {str(value)[:200]}")
    return converted


def _read(space: Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(value)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return numpy.asarray(value, dtype=space.dtype)
    if isinstance(space, spaces.Tuple):
        return tuple(_read(subspace, item) for subspace, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: _read(subspace, value[key]) for key, subspace in space.spaces.items()}
    return value
