"""An instance of the environment in this process, called as a server calls it."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

from pydantic import TypeAdapter

from openenv_core.apps import Described
from openenv_core.checker.check import CheckFailed
from openenv_core.checker.playing.parting import Result
from openenv_core.protocol import codes
from openenv_core.protocol.codes import Refusal
from openenv_core.protocol.replies import decode_reply, encode_observation
from openenv_core.protocol.requests import RequestDecoder

EPISODE_ID: Final = "ropewalk-check"
"""Every compared episode has it, so that environments that show it show the same."""


class LocalEnvironment:
    """One instance. What its methods return is what its author wrote, unencoded.

    Args:
        served: What the application serves.
        reset_options: What every reset is given besides.

    Raises:
        CheckFailed: Its constructor raises.
    """

    def __init__(self, served: Described, reset_options: Mapping[str, Any] | None = None) -> None:
        self._reset_options = dict(reset_options or {})
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
        return self._called(method, **_accepted(method, {**self._reset_options, **options}))

    def step(self, action: dict[str, Any]) -> Any:
        """Apply one action, given by its fields."""
        return self.apply(self._actions.validate_python(action))

    def apply(self, action: Any) -> Any:
        """Apply one action, given as an instance of its model."""
        return self._called(self._method("step"), action)

    def state(self) -> Any:
        """Read the state."""
        return self._instance.state

    def close(self) -> None:
        """Give back what the instance holds."""
        with suppress(Exception):  # another check's to tell
            if callable(close := getattr(self._instance, "close", None)):
                self._called(close)
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, name: str) -> Callable[..., Any]:
        return _method_of(self._instance, name)

    def _called(self, method: Callable[..., Any], *values: Any, **options: Any) -> Any:
        found = method(*values, **options)
        return self._runner.run(_awaited(found)) if inspect.isawaitable(found) else found


class LocalSession:
    """One instance whose results are what would cross the wire, so that they can be compared with what did.

    Args:
        served: What the application serves.
        reset_options: What every reset is given besides.
    """

    def __init__(self, served: Described, reset_options: Mapping[str, Any] | None = None) -> None:
        self._decoder: RequestDecoder[Any] = RequestDecoder(served.action)
        self._environment = LocalEnvironment(served, reset_options)

    def reset(self, seed: int, episode_id: str = EPISODE_ID) -> Result:
        """Begin an episode."""
        return _answer(lambda: self._environment.reset(seed=seed, episode_id=episode_id))

    def step(self, action: dict[str, Any]) -> Result:
        """Apply one action."""
        try:
            decoded = self._decoder.action(action, 0)
        except Refusal as refusal:
            return {"error": refusal.code}
        return _answer(lambda: self._environment.apply(decoded))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._environment.close()


def takes_seed(served: Described) -> bool | None:
    """Whether the environment's reset takes a seed; None where its class is not known before there is one."""
    if not isinstance(served.factory, type):
        return None
    return "seed" in _accepted(_method_of(served.factory, "reset"), {"seed": 0})


def _method_of(environment: Any, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(environment, f"{name}_async", None) or getattr(environment, name)
    return found


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a method takes, as a server would pass them."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _answer(call: Callable[[], Any]) -> Result:
    try:
        data = decode_reply(encode_observation(call()), "observation")
    except Exception:  # a server answers each of them like this
        return {"error": codes.EXECUTION_ERROR}
    return {"observation": data["observation"], "reward": data["reward"], "done": data["done"]}


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
