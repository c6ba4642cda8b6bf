"""A reward function: found by its dotted path, called, and its answer checked."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from rl_bridge.errors import RewardFailed

RewardFunction: TypeAlias = Callable[[Any, Any, Any], float | None]
"""`compute_reward(prompt, response, target)`: a number, or None where nobody can say."""

PARAMETERS = ("prompt", "response", "target")


def load_function(path: str) -> RewardFunction:
    """Import a reward function.

    Args:
        path: `package.module.function`.

    Raises:
        RewardFailed: There is none, or it cannot be called as a reward function is.
    """
    module_name, _, name = path.rpartition(".")
    if not (module_name and name):
        raise RewardFailed(f"expected a reward function as 'package.module.function', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RewardFailed(
            f"expected to import {module_name!r} for the reward function {path!r}, "
            f"got {type(error).__name__}: {error}; start the run where the module can be imported from"
        ) from error
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else type(function).__name__
        raise RewardFailed(f"expected {path!r} to be a plain function, got {kind}")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as error:
        raise RewardFailed(
            f"expected {path!r} to take prompt, response and target, got: {error}; "
            "write def compute_reward(prompt, response, target) -> float | None"
        ) from error
    except ValueError:
        pass  # written in C, without a signature that could be looked at
    return function  # type: ignore[no-any-return]


def checked_reward(path: str, value: object) -> float | None:
    """Return what a reward function returned, as a number or None.

    Raises:
        RewardFailed: It is neither, or not finite.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # numbers of numpy and torch convert too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardFailed(f"expected {path!r} to return a finite number or None, got {value!r:.200}")
    return number
