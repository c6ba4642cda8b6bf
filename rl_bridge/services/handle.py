"""Handles of a service for other processes: which replicas serve, and direct calls to them."""

import asyncio
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_bridge.services.balancer import Balancer, Key, ReplicaTarget, key_of


@dataclass(slots=True, frozen=True)
class Fanout:
    """The result of a fan-out: each replica's value or exception, by the replica's id."""

    values: dict[int, Any]
    failed: dict[int, Exception]


class EndpointOwner:
    """An object whose attributes are the endpoints of a service, whose calls a balancer sends to replicas.

    Attributes:
        endpoints: The names that can be called.
    """

    endpoints: frozenset[str] = frozenset()

    def __init__(self, balancer: Balancer, endpoints: frozenset[str]) -> None:
        self.endpoints = endpoints
        self._balancer = balancer

    def _pick(self) -> ReplicaTarget | None:
        """Return the target that the next call goes to; None if there is none."""
        return self._balancer.pick_least_loaded()

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        raise TypeError(
            f"{type(self).__name__} sends calls to one replica; call {name}.fanout on the service"
        )

    def __getattr__(self, name: str) -> "Endpoint":
        # pickle and copy look up names with an underscore on objects that are not initialized yet.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.endpoints:
            choices = ", ".join(sorted(self.endpoints))
            raise AttributeError(f"expected one of the endpoints {choices}, got {name!r}")
        return Endpoint(self, name)


class Endpoint:
    """One endpoint of a service."""

    def __init__(self, owner: EndpointOwner, name: str) -> None:
        self._owner = owner
        self._name = name

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on one replica and return its value; with several ranks, the first rank's.

        Raises:
            BridgeError: The endpoint raised it.
            RemoteError: The endpoint raised something else.
            ReplicaLostError: The replica's process died during the call, which may or may not have been executed.
            NoReplicaError: No replica served within the deadline.
            RoleError: The service has exhausted its restart budget.
        """
        return await self._owner._balancer.route(self._name, args, kwargs, self._owner._pick)

    async def fanout(self, *args: Any, **kwargs: Any) -> Fanout:
        """Call it on all serving replicas; the result has the values and the failures.

        Raises:
            Exception: The failure of one of them, if all failed.
            NoReplicaError: No replica served within the deadline.
            RoleError: The service has exhausted its restart budget.
        """
        return await self._owner._fan_out(self._name, args, kwargs)

    async def tell(self, *args: Any, **kwargs: Any) -> Fanout:
        """Call it on the replicas that serve now, if any; state is replayed on those that start later."""
        return await self._owner._fan_out(self._name, args, kwargs, wait=False)


@dataclass(slots=True, frozen=True)
class Roster:
    """The replicas that serve at one moment; it is sent between processes.

    Attributes:
        epoch: Grows with every change; the higher one is the newer. The first that a service sends has 1 or more.
        repeatable: Endpoints that are retried if a replica is lost.
        wait_s: Seconds that a call waits while no replica serves.
        lost: Recently lost starts of replicas, whose calls in flight are to be ended.
    """

    service: str
    epoch: int = 0
    endpoints: frozenset[str] = frozenset()
    repeatable: frozenset[str] = frozenset()
    wait_s: float = 0.0
    targets: tuple[ReplicaTarget, ...] = ()
    lost: tuple[Key, ...] = ()

    def of_first_ranks(self) -> "Roster":
        """Return the roster with the first rank of each replica alone, for calls that concern no other."""
        return replace(self, targets=tuple(target.first_rank() for target in self.targets))


class StickySession(EndpointOwner):
    """A session whose calls all go to one replica until that is lost or suspended; then to another.

    Args:
        balancer: The service's.
        endpoints: The names that can be called.
        near: A session whose replica is preferred, because it has cached state of use to this one.
        max_sessions: A replica with this many sessions is no longer preferred.

    Attributes:
        moves: How often the replica has changed since the session began; each time its cached state was lost.
    """

    def __init__(
        self,
        balancer: Balancer,
        endpoints: frozenset[str],
        *,
        near: "StickySession | None" = None,
        max_sessions: int = sys.maxsize,
    ) -> None:
        super().__init__(balancer, endpoints)
        self._near = near
        self._max_sessions = max_sessions
        self._target: ReplicaTarget | None = None
        self._closed = False
        self.moves = 0

    @property
    def replica(self) -> int | None:
        """The id of the replica that the next call goes to; None if none serves."""
        target = self._pick()
        return None if target is None else target.replica

    def close(self) -> None:
        """Release the replica. A call that is still in flight or to be sent goes on, and binds no replica again."""
        self._closed = True
        if self._target is not None:
            self._balancer.release_session(self._target)
            self._target = None

    def _pick(self) -> ReplicaTarget | None:
        current, balancer = self._target, self._balancer
        if current is not None and balancer.holds(current) and not balancer.is_suspended(current.replica):
            return current
        near = None if self._near is None else self._near._pick()
        target = self._balancer.bind_session(near, self._max_sessions)
        if target is not None and self._closed:
            self._balancer.release_session(target)
        elif target is not None:
            if current is not None:
                self._balancer.release_session(current)
                self.moves += key_of(current) != key_of(target)
            self._target = target
        return target


class BalancedEndpoints(EndpointOwner):
    """An object whose calls a balancer spreads over replicas."""

    @property
    def serving(self) -> int:
        """The number of replicas that calls can go to now."""
        return len(self._balancer.targets)

    def session(self, *, near: StickySession | None = None, max_sessions: int = sys.maxsize) -> StickySession:
        """Open a session whose calls stay with one replica as long as it lives; see `StickySession`."""
        return StickySession(self._balancer, self.endpoints, near=near, max_sessions=max_sessions)

    async def query_replicas(self, name: str, *args: Any, timeout_s: float) -> dict[int, Any]:
        """Call an endpoint of all serving replicas outside of the balancing; returns replies by replica.

        These calls do not count towards a replica's load or failures. Replicas that failed, were lost meanwhile, or did
        not answer in time are left out.
        """

        async def call_replica(target: ReplicaTarget) -> Any:
            async with asyncio.timeout(timeout_s):
                return await target.call(name, args, {})

        targets = self._balancer.targets
        replies = await asyncio.gather(*map(call_replica, targets), return_exceptions=True)
        return {
            target.replica: reply
            for target, reply in zip(targets, replies, strict=True)
            if not isinstance(reply, BaseException)
        }


class ServiceHandle(BalancedEndpoints):
    """Routes calls to a service's replicas from any process.

    Loads count this handle's own calls only. The controller sends new rosters to `update`; between two rosters, a
    replica whose process turns out to be gone is left out. It may begin with `Roster(name)`, of which nobody serves.
    """

    def __init__(self, roster: Roster) -> None:
        super().__init__(Balancer(roster.service), roster.endpoints)
        self._epoch = -1
        self.update(roster)

    def update(self, roster: Roster) -> None:
        """Use a roster, unless it is older than the current one."""
        if roster.epoch > self._epoch:
            self._epoch, self.endpoints = roster.epoch, roster.endpoints
            self._balancer.repeatable, self._balancer.wait_s = roster.repeatable, roster.wait_s
            self._balancer.replace(roster.targets)
            for key in roster.lost:
                self._balancer.lose(key, "the controller says that it is gone")


@dataclass(slots=True, frozen=True)
class LocalTarget:
    """An object of this process as the only replica of a service."""

    wrapped: object
    replica: int = 0
    incarnation: int = 1

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method, and await what it returns if it can be awaited."""
        value = getattr(self.wrapped, name)(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def first_rank(self) -> "LocalTarget":
        """Return itself: it is one process."""
        return self


class LocalService(BalancedEndpoints):
    """Wraps a local object as a service: its public methods get `.route` and `.fanout`; its only replica has id 0."""

    def __init__(self, wrapped: object) -> None:
        kind = type(wrapped)
        public = (name for name in dir(kind) if not name.startswith("_"))
        super().__init__(
            Balancer(kind.__name__), frozenset(name for name in public if callable(getattr(kind, name)))
        )
        self._balancer.add(LocalTarget(wrapped))

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        return Fanout({0: await self._balancer.route(name, args, kwargs, self._pick)}, {})
