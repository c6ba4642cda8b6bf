"""What a server process serves: an application of ours with its settings, or a foreign one behind the guard."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from openenv_core.errors import ConfigurationError
from servers.app import EnvironmentApp
from servers.fleet.forwarder import Forwarder, ids_of
from servers.fleet.peers import UnixPeers
from servers.fleet.plan import WorkerPlan
from servers.fleet.slots import SharedSlots, SlotTable
from servers.hosting import Assembled
from servers.security import Guard, principals
from servers.settings import ServerSettings


def assemble(app: Any, name: str, settings: ServerSettings, options: Sequence[str]) -> Assembled:
    """Apply the settings.

    Args:
        app: The ASGI application that was loaded.
        name: What it was asked for by.
        settings: The settings.
        options: Options that were given and that only an application of ours can heed.

    Raises:
        ConfigurationError: A foreign application cannot heed the options.
    """
    if isinstance(app, EnvironmentApp):
        app.configure(settings)
        return Assembled(app, app.drain, app.take_refusals())
    if options:
        raise ConfigurationError(
            f"expected an app of create_app for {', '.join(options)}, got {type(app).__name__} at {name!r}; "
            "leave the options out, or build the app with create_app"
        )
    return Assembled(Guard(app, settings))


def assemble_worker(app: Any, plan: WorkerPlan) -> Assembled:
    """Make an application one of several workers.

    Raises:
        ConfigurationError: It is a foreign one, or its class does not allow as many sessions.
    """
    if not isinstance(app, EnvironmentApp):
        raise ConfigurationError(
            f"expected an app of create_app for --workers, got {type(app).__name__} at {plan.app!r}; the workers "
            "share what only such an app knows: its sessions and their cap"
        )
    settings, workers = plan.settings, plan.workers
    total = settings.max_sessions or app.cap
    factory = app.served.factory
    local = total
    if isinstance(factory, type) and not getattr(factory, "SUPPORTS_CONCURRENT_SESSIONS", False):
        local = 1
        if total > workers:
            raise ConfigurationError(
                f"expected max_sessions of at most {workers} for {factory.__name__} in {workers} workers, got {total}; "
                "a process holds one of its instances, unless the class sets SUPPORTS_CONCURRENT_SESSIONS = True"
            )
        settings = replace(settings, max_sessions=1)
    owners = principals(settings.tokens) or [""]
    slots = SharedSlots(
        SlotTable(plan.slots, workers, len(owners)),
        worker=plan.index,
        workers=workers,
        owners=owners,
        total=total,
        local=local,
        per_owner=settings.max_sessions_per_token,
    )
    app.configure(settings, slots=slots, new_id=ids_of(plan.index, workers))

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
        else:
            await app.serve_admitted(scope, receive, send)

    forwarder = Forwarder(
        inside,
        index=plan.index,
        workers=workers,
        private=plan.private_socket(plan.index),
        peers=UnixPeers(plan.private_socket, settings.step_timeout_s),
        elsewhere=slots.elsewhere,
    )
    return Assembled(Guard(forwarder, settings), app.drain, app.take_refusals())
