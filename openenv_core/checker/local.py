"""An instance of the environment in this process, looked at before anything crosses the wire."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

from pydantic import TypeAdapter

from openenv_core.apps import Described
from openenv_core.checker.check import CheckFailed


class LocalEnvironment:
    """One instance. What its methods return is what its author wrote, unencoded.

    Args:
        served: What the application serves.

    Raises:
        CheckFailed: Its constructor raises.
    """

    def __init__(self, served: Described) -> None:
        self._actions: TypeAdapter[Any] = TypeAdapter(served.action)
        self._runner = asyncio.Runner()
        try:
            self._instance = served.factory()
        except Exception as error:
            self._runner.close()
            raise CheckFailed(
                f"expected the environment's constructor to return, got {type(error).__name__}: {error}",
                change="make the constructor work without arguments, any number of times",
            ) from error

    def reset(self, **options: Any) -> Any:
        """Begin an episode, with those options that the environment takes."""
        method = self._method("reset")
        parameters = inspect.signature(method).parameters
        anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return self._result(
            method, **{name: value for name, value in options.items() if anything or name in parameters}
        )

    def step(self, action: dict[str, Any]) -> Any:
        """Apply one action, given by its fields."""
        return self._result(self._method("step"), self._actions.validate_python(action))

    def state(self) -> Any:
        """Read the state."""
        return self._instance.state

    def close(self) -> None:
        """Give back what the instance holds."""
        with suppress(Exception):  # another check's to tell
            if callable(close := getattr(self._instance, "close", None)):
                self._result(close)
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._instance, f"{name}_async", None) or getattr(
            self._instance, name
        )
        return found

    def _result(self, method: Callable[..., Any], *values: Any, **options: Any) -> Any:
        found = method(*values, **options)
        return self._runner.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
