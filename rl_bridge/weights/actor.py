"""The directory as a Monarch actor in the controller's own process, so that it lives exactly as long as the run."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from rl_bridge.errors import BridgeError, MissingDependencyError, WeightsError
from rl_bridge.weights.directory import WeightDirectory

try:
    from monarch.actor import Actor, ActorError, concurrent_endpoint, context, this_proc
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error

RESPONSE_TIMEOUT_S = 30.0
"""The timeout of a call to the directory; a call itself waits for less than a second."""


class DirectoryActor(Actor):
    """A thin shell around `WeightDirectory`."""

    def __init__(self) -> None:
        self._directory = WeightDirectory()

    @concurrent_endpoint
    async def call_method(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the directory."""
        return await getattr(self._directory, method)(*args)


class RemoteDirectory:
    """A proxy of the directory with the methods of `WeightDirectory`; it is sent to the run's processes."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def group(self) -> str:
        """Return the name of the calling actor's mesh, which all of its ranks share; a later spawn has another."""
        return str(context().actor_instance.actor_id).partition(".")[0]

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):  # pickle looks up some
            raise AttributeError(method)
        return partial(self._call_directory, method)

    async def _call_directory(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                # One actor, so `choose` has no choice; with torchmonarch 0.7 `call_one` leaks a kilobyte per call.
                return await self._actor.call_method.choose(method, args)
        except ActorError as error:
            if isinstance(error.exception, BridgeError):
                raise error.exception from error
            raise WeightsError(f"the directory of the weight store failed: {error}") from error
        except TimeoutError:
            raise WeightsError(
                f"expected an answer of the weight store's directory within {RESPONSE_TIMEOUT_S:g} s, got none; "
                "it lives in the run's controller: is that alive, and not blocked?"
            ) from None


def spawn_directory() -> WeightDirectory:
    """Start a directory in this process, for all processes of the run."""
    remote = RemoteDirectory(this_proc().spawn("weights_directory", DirectoryActor))
    return cast(WeightDirectory, remote)
