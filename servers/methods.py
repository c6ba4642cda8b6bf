"""The methods of an environment class: which are served, how they are called, what options they take."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Which options a method takes.

    Attributes:
        names: Those that it names; None where it takes any.
        barred: Names of parameters that are no options: itself, the action.
    """

    names: frozenset[str] | None
    barred: frozenset[str]


@dataclass(frozen=True, slots=True)
class EnvironmentMethods:
    """What there is to know of an environment class, worked out once.

    Attributes:
        inline: Every method runs on the loop and returns without waiting.
        on_loop: Plain methods run on the loop.
        reset: Name of the method that resets, which may be `reset_async`.
        step: Likewise.
        close: Likewise.
        reset_async: `reset` is a coroutine function.
        step_async: Likewise.
        reset_options: What the method takes beside the action.
        step_options: Likewise.
    """

    inline: bool
    on_loop: bool
    reset: str
    step: str
    close: str
    reset_async: bool
    step_async: bool
    reset_options: Options
    step_options: Options


@lru_cache(maxsize=256)
def plan_of(cls: type) -> EnvironmentMethods:
    """Work out how the methods of an environment class are run."""
    reset, step, close = (
        f"{name}_async" if hasattr(cls, f"{name}_async") else name for name in ("reset", "step", "close")
    )
    reset_async, step_async = (inspect.iscoroutinefunction(getattr(cls, name)) for name in (reset, step))
    on_loop = not getattr(cls, "BLOCKING", True)
    # Environments of declared tools say whether one of these is asynchronous; of others a call may wait, and with it
    # all that share the session.
    may_wait = getattr(cls, "STEPS_MAY_WAIT", inspect.iscoroutinefunction(getattr(cls, "call_tool", None)))
    return EnvironmentMethods(
        inline=on_loop and not reset_async and not step_async and not may_wait,
        on_loop=on_loop,
        reset=reset,
        step=step,
        close=close,
        reset_async=reset_async,
        step_async=step_async,
        reset_options=_options(getattr(cls, reset), skip=1),
        step_options=_options(getattr(cls, step), skip=2),
    )


def is_environment(value: object) -> bool:
    """Whether a factory has returned what can be served; the class need not be ours, but has to have the methods."""
    return hasattr(type(value), "reset") and hasattr(type(value), "step")


def _options(method: Callable[..., Any], skip: int) -> Options:
    parameters = list(inspect.signature(method).parameters.values())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    barred = frozenset(p.name for p in parameters[:skip] if p.kind not in variadic)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Options(None, barred)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return Options(frozenset(p.name for p in parameters[skip:] if p.kind in by_name), barred)


def accepted(given: Mapping[str, Any], taken: Options) -> Mapping[str, Any]:
    """Return the options that the method takes."""
    names, barred = taken.names, taken.barred
    if names is None:
        return {name: value for name, value in given.items() if name not in barred}
    return {name: value for name, value in given.items() if name in names}


def name_of(factory: Callable[..., Any]) -> str:
    """Return what a class, or whatever else makes environments, is called."""
    return str(getattr(factory, "__name__", type(factory).__name__))
