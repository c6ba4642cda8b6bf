"""How services are called: `service.generate.route(...)`, `service.update_weights.fanout(...)`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Fanout:
    """What all replicas answered.

    Attributes:
        values: What each replica returned, by its id.
        failed: What each other replica failed with, by its id.
    """

    values: dict[int, Any]
    failed: dict[int, Exception]


class Routed(ABC):
    """Something whose endpoints are attributes, to be called by `route`."""

    @property
    @abstractmethod
    def endpoints(self) -> frozenset[str]:
        """The names that can be called."""

    @abstractmethod
    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    async def _fan_out(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Fanout:
        raise TypeError(
            f"{type(self).__name__} sends calls to one replica; call {name}.fanout on the service"
        )

    def __getattr__(self, name: str) -> "Endpoint":
        # Names with an underscore are looked up by pickle and copy, on objects that are not made yet.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.endpoints:
            known = ", ".join(sorted(self.endpoints))
            raise AttributeError(f"expected one of the endpoints {known}, got {name!r}")
        return Endpoint(self, name)


class Endpoint:
    """One endpoint of a service."""

    def __init__(self, owner: Routed, name: str) -> None:
        self._owner = owner
        self._name = name

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on one replica and return what it answers; of several ranks, what the first answers.

        Raises:
            BridgeError: The endpoint raised it.
            RemoteError: The endpoint raised something else.
            ReplicaLost: The replica's process died meanwhile; whether it was carried out nobody knows.
            NoReplica: None served within the deadline.
            RoleFailed: The service has used up its restarts.
        """
        return await self._owner._route(self._name, args, kwargs)

    async def fanout(self, *args: Any, **kwargs: Any) -> Fanout:
        """Call it on all replicas that serve, and say who failed.

        Raises:
            Exception: What one of them failed with, where all of them failed.
            NoReplica: None served within the deadline.
            RoleFailed: The service has used up its restarts.
        """
        return await self._owner._fan_out(self._name, args, kwargs)
