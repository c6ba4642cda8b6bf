"""Services on Monarch: replicas of an actor, routed to, fanned out to, restarted."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.services.actor import BoundOptions, ServiceActor
    from rl_bridge.services.fleet import Fleet, FleetEvent
    from rl_bridge.services.handle import (
        Endpoint,
        Fanout,
        LocalService,
        Roster,
        Routed,
        ServiceHandle,
        StickySession,
    )
    from rl_bridge.services.hosts import Hosts
    from rl_bridge.services.keeper import ReplicaState
    from rl_bridge.services.options import RestartPolicy
    from rl_bridge.services.service import ReplicaStatus, Service

# Each name's module is imported when the name is first asked for: the logic needs no Monarch.
_HOMES = {
    "BoundOptions": "actor",
    "Endpoint": "handle",
    "Fanout": "handle",
    "Fleet": "fleet",
    "FleetEvent": "fleet",
    "Hosts": "hosts",
    "LocalService": "handle",
    "ReplicaState": "keeper",
    "ReplicaStatus": "service",
    "RestartPolicy": "options",
    "Roster": "handle",
    "Routed": "handle",
    "Service": "service",
    "ServiceActor": "actor",
    "ServiceHandle": "handle",
    "StickySession": "handle",
}

__all__ = [
    "BoundOptions",
    "Endpoint",
    "Fanout",
    "Fleet",
    "FleetEvent",
    "Hosts",
    "LocalService",
    "ReplicaState",
    "ReplicaStatus",
    "RestartPolicy",
    "Roster",
    "Routed",
    "Service",
    "ServiceActor",
    "ServiceHandle",
    "StickySession",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
