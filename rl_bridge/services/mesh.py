"""One start of a replica on Monarch, as something to call from any process."""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_bridge.errors import BridgeError, MissingStack, RemoteError
from rl_bridge.services.balancer import TargetGone

try:
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch._src.actor.endpoint import EndpointProperty
    from monarch.actor import ActorError
except ModuleNotFoundError as missing:
    raise MissingStack("torchmonarch") from missing


@dataclass(slots=True, frozen=True)
class MeshTarget:
    """The actors of one start of a replica; travels between processes.

    Attributes:
        replica: The replica's id.
        incarnation: Counts its starts.
        ranks: One actor a process, in the order of their ranks.
    """

    replica: int
    incarnation: int
    ranks: tuple[Any, ...]

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an endpoint on all ranks; the first rank's value.

        A rank that fails ends the call at once: the others may be waiting for it.

        Raises:
            TargetGone: A process of it is gone.
            BridgeError: The endpoint raised it.
            RemoteError: The endpoint raised something else.
        """
        return (await self.call_all(name, args, kwargs))[0]

    async def call_all(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call an endpoint on all ranks; every rank's value. Raises as `call` does."""
        # All are sent before any is waited for, so every rank gets concurrent calls in the same order.
        sent = [getattr(rank, name).call_one(*args, **kwargs) for rank in self.ranks]
        if len(sent) == 1:
            return [await _answer(sent[0])]
        answers = [asyncio.ensure_future(_answer(future)) for future in sent]
        try:
            return list(await asyncio.gather(*answers))
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)


async def _answer(sent: Any) -> Any:
    try:
        return await sent
    except SupervisionError as error:
        raise TargetGone(_told(error)) from error
    except ActorError as error:
        if isinstance(error.exception, BridgeError):  # ours: the caller knows what to do with it
            raise error.exception from error
        raise RemoteError(
            f"the actor raised {type(error.exception).__name__}: {error.exception}\n{error.exception_formatted}"
        ) from error
    except Exception as error:
        # An exception that cannot be made again from what was sent of it comes as the failure to make it.
        raise RemoteError(
            f"the actor raised something that cannot travel between processes: {error}"
        ) from error


def _told(error: BaseException) -> str:
    """What Monarch says of a lost process, in one line."""
    return " ".join(str(error).split())


def endpoints_of(actor: type[Any]) -> frozenset[str]:
    """The public endpoints of an actor's class."""
    return frozenset(
        name
        for name in dir(actor)
        if not name.startswith("_") and isinstance(inspect.getattr_static(actor, name), EndpointProperty)
    )
