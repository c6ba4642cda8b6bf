"""A service as other processes see it: who serves, and how to call them without the controller."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_bridge.services.balancer import Balancer, Key, ReplicaTarget, key_of


@dataclass(slots=True, frozen=True)
class Fanout:
    """What all replicas answered: what each returned, or failed with, by its id."""

    values: dict[int, Any]
    failed: dict[int, Exception]


class Routed(ABC):
    """An object whose attributes are endpoints, to be called by `route`."""

    endpoints: frozenset[str] = frozenset()
    """The names that can be called."""

    @abstractmethod
    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
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
            ReplicaLostError: The replica's process died meanwhile; whether it was carried out nobody knows.
            NoReplicaError: None served within the deadline.
            RoleError: The service has used up its restarts.
        """
        return await self._owner._route(self._name, args, kwargs)

    async def fanout(self, *args: Any, **kwargs: Any) -> Fanout:
        """Call it on all replicas that serve, and say who failed.

        Raises:
            Exception: What one of them failed with, where all of them failed.
            NoReplicaError: None served within the deadline.
            RoleError: The service has used up its restarts.
        """
        return await self._owner._fan_out(self._name, args, kwargs)

    async def tell(self, *args: Any, **kwargs: Any) -> Fanout:
        """Call it on all replicas that serve now, be it none; what defines state is given to those that start later."""
        return await self._owner._fan_out(self._name, args, kwargs, wait=False)


@dataclass(slots=True, frozen=True)
class Roster:
    """The replicas that serve at one moment; travels between processes.

    Attributes:
        epoch: Grows with every change; the higher one is the newer.
        repeatable: Endpoints that are sent again where a replica is lost.
        wait_s: Seconds that a call waits while nobody serves.
        lost: Starts of replicas that were lost lately: nobody waits for what they were asked.
    """

    service: str
    epoch: int
    endpoints: frozenset[str]
    repeatable: frozenset[str]
    wait_s: float
    targets: tuple[ReplicaTarget, ...]
    lost: tuple[Key, ...] = ()


class StickySession(Routed):
    """Calls that go to the same replica until that is lost, or fails whatever it is asked; then to another.

    Args:
        balancer: The service's.
        endpoints: What can be called.
        near: A session whose replica knows what ours should know.
        room: The sessions that a replica may have and still be chosen for being near.

    Attributes:
        moved: How often the replica has changed since the session began: what it knew of us is gone.
    """

    def __init__(
        self,
        balancer: Balancer,
        endpoints: frozenset[str],
        *,
        near: "StickySession | None" = None,
        room: int = sys.maxsize,
    ) -> None:
        self._balancer = balancer
        self.endpoints = endpoints
        self._near = near
        self._room = room
        self._target: ReplicaTarget | None = None
        self.moved = 0

    @property
    def replica(self) -> int | None:
        """The replica that the next call goes to; None where none serves."""
        target = self._settle()
        return None if target is None else target.replica

    def close(self) -> None:
        """The replica need not keep its place for us; a call after this one opens the session again."""
        if self._target is not None:
            self._balancer.unsettle(self._target)
            self._target = None

    def _settle(self) -> ReplicaTarget | None:
        known, balancer = self._target, self._balancer
        if known is not None and balancer.holds(known) and not balancer.is_suspended(known.replica):
            return known
        near = None if self._near is None else self._near._settle()
        target = self._balancer.settle(near, self._room)
        if target is not None:
            if known is not None:
                self._balancer.unsettle(known)
                self.moved += key_of(known) != key_of(target)
            self._target = target
        return target

    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return await self._balancer.route(name, args, kwargs, self._settle)


class Balanced(Routed):
    """An object whose calls a balancer spreads over replicas."""

    def __init__(self, balancer: Balancer, endpoints: frozenset[str]) -> None:
        self.endpoints = endpoints
        self._balancer = balancer

    def session(self, *, near: StickySession | None = None, room: int = sys.maxsize) -> StickySession:
        """Calls that stay with one replica as long as it lives; see `StickySession`."""
        return StickySession(self._balancer, self.endpoints, near=near, room=room)

    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return await self._balancer.route(name, args, kwargs)


class ServiceHandle(Balanced):
    """Routes calls to a service's replicas from any process.

    Least loaded is meant by this handle's own calls. Who serves is told by the controller: `update`. Between
    two rosters a replica whose process turns out to be gone is left out.
    """

    def __init__(self, roster: Roster) -> None:
        balancer = Balancer(roster.service, roster.repeatable, roster.wait_s)
        super().__init__(balancer, roster.endpoints)
        self._epoch = roster.epoch
        balancer.replace(roster.targets)

    @property
    def serving(self) -> int:
        """How many replicas calls can go to now."""
        return len(self._balancer.targets)

    def update(self, roster: Roster) -> None:
        """Take a roster, unless it is older than the one at hand."""
        if roster.epoch > self._epoch:
            self._epoch = roster.epoch
            self._balancer.replace(roster.targets)
            for key in roster.lost:
                self._balancer.lose(key, "the controller says that it is gone")


class LocalService(Routed):
    """Gives an object's public methods `.route` and `.fanout`; it is its own only replica, with the id 0."""

    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped
        kind = type(wrapped)
        public = (name for name in dir(kind) if not name.startswith("_"))
        self.endpoints = frozenset(name for name in public if callable(getattr(kind, name)))

    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = getattr(self._wrapped, name)(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        return Fanout({0: await self._route(name, args, kwargs)}, {})
