"""Converts values of Gymnasium's spaces to JSON and back: arrays and tuples are lists, numpy's numbers plain ones."""

from collections.abc import Mapping
from typing import Any

import numpy
from gymnasium import Space, spaces

from openenv_core.errors import EnvironmentFailureError


def to_json(value: Any) -> Any:
    """Return a value of a space as JSON values."""
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(space: Space[Any], value: Any) -> Any:
    """Return the space's value for a JSON value.

    Raises:
        EnvironmentFailureError: The value is not in the space.
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
