"""`create_app`: assembles routes, sessions and security into one ASGI application."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_core import ConcurrencyConfig, ConfigurationError, State
from openenv_core.errors import OpenEnvError
from openenv_core.lifecycle import default_cap, read_models
from openenv_core.multi_agent import MultiAgentEnvironment
from openenv_core.protocol.batch import ObservationEncoder
from openenv_core.protocol.requests import RequestDecoder
from servers.execution import Executor, Factory, name_of
from servers.mcp.entry import McpEntry
from servers.mcp.requests import MCP_PATH
from servers.metrics import METRICS_PATH, ServerMetrics, SharedCounts
from servers.page import Page, PageOptions
from servers.routes.about import MetadataSource, about_router, page_router
from servers.routes.batch import BatchDialect
from servers.routes.description import describe_api, describe_each
from servers.routes.http import HttpRoutes, path_of
from servers.routes.jsonrpc import JsonRpc
from servers.routes.link import Links
from servers.routes.tasks import tasks_router
from servers.routes.websocket import SESSION_PATH, FrameDialect, RpcDialect, SocketRoute, Sockets
from servers.seats import seat_environment
from servers.security import Guard
from servers.sessions import SessionSlots, SessionTable
from servers.settings import MODES, Mode, ServerSettings
from servers.tooling import Tooling

logger = logging.getLogger("servers")

_API_VERSION: Final = "1.0.0"
"""Version of the HTTP interface. Released validators choose their profile by its major number."""


_SESSION_PATHS: Final = ("/reset", "/step", "/state", MCP_PATH)
"""Prefixes of the HTTP paths whose bytes the metrics count."""

_SOCKET_PATHS: Final = (SESSION_PATH, MCP_PATH)

Lifespan: TypeAlias = Callable[["EnvironmentApp"], AbstractAsyncContextManager[None]]
"""Returns a context that is entered when a server process starts, and exited when it ends, after its last session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppSettings:
    """What an app serves: the arguments of `create_app`.

    Attributes:
        models: The models to describe, by their keys in /schema.
        cap: Greatest number of sessions, if the settings give none.
        page: Options of the page to play on; None for no page, whatever the settings.
    """

    factory: Factory
    action: Any
    models: dict[str, Any]
    name: str | None
    cap: int
    lifespan: Lifespan | None = None
    page: PageOptions | None = None


class _InnermostMiddleware:
    """Passes what middleware of the app's author has let through to standard MCP, to our sockets, or to the routes."""

    def __init__(self, app: ASGIApp, owner: "EnvironmentApp") -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket" and path_of(scope) in _SOCKET_PATHS:
            await self._owner.router(scope, receive, send)
        elif scope["type"] == "http" and path_of(scope).startswith(MCP_PATH):
            await self._owner.mcp(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)


class EnvironmentApp(FastAPI):
    """A FastAPI app whose own sockets pass the author's middleware, but not the framework's.

    That wraps every send of a WebSocket, which would take a quarter of the time of a trivial step.

    Attributes:
        served: What the app serves; the checker reads it.
        settings: The server's settings.
    """

    def __init__(self, served: AppSettings, settings: ServerSettings) -> None:
        super().__init__(
            title=_title(served),
            version=_API_VERSION,
            lifespan=_lifespan,
            docs_url=None,
            redoc_url=None,
            # Middleware that the author adds comes before it.
            middleware=[Middleware(_InnermostMiddleware, owner=self)],
        )
        self.served = served
        self.settings = settings
        self._slots: SessionSlots | None = None
        self._new_id: Callable[[], str] | None = None
        self._counts: SharedCounts | None = None
        self._components: _Parts | None = None
        self._started = False
        self._own_route_count = len(self.router.routes)
        self._refusal: OpenEnvError | None = None
        self._refusal_collected = False
        _check_cap(served.factory, settings.max_sessions or served.cap)

    @property
    def routes(self) -> list[BaseRoute]:
        """Every route: ours, and after them those of the author."""
        self._ensure_built()
        return self.router.routes

    @property
    def sessions(self) -> SessionTable:
        """The app's sessions."""
        return self._ensure_built().sessions

    @property
    def tooling(self) -> Tooling:
        """Lists and calls the environments' tools."""
        return self._ensure_built().tooling

    @property
    def cap(self) -> int:
        """Greatest number of sessions."""
        return self.settings.max_sessions or self.served.cap

    def configure(
        self,
        settings: ServerSettings,
        *,
        slots: SessionSlots | None = None,
        new_id: Callable[[], str] | None = None,
        counts: SharedCounts | None = None,
    ) -> None:
        """Replace the settings, before the server starts.

        Args:
            settings: Settings that override environment variables and the arguments of `create_app`.
            slots: Counts sessions; by default those of this process only.
            new_id: Generates session ids; by default uuid4.
            counts: Counters shared by several processes; by default this process counts alone.

        Raises:
            ConfigurationError: The server is running, or the class does not allow so many sessions.
        """
        if self._started:
            raise ConfigurationError("the server runs already; give it other settings before it starts")
        if self._components is not None:  # already built, since a property was read
            del self.router.routes[self._own_route_count : self._own_route_count + self._components.routes]
            self._components = None
        _check_cap(self.served.factory, settings.max_sessions or self.served.cap)
        self.settings, self._slots, self._new_id, self._counts = settings, slots, new_id, counts

    def _ensure_built(self) -> "_Parts":
        """Return the app's parts, built on first use, which is usually when its server starts."""
        if self._components is None:
            self._components = self._build()
        return self._components

    def _build(self) -> "_Parts":
        served, settings = self.served, self.settings
        extra: dict[str, Any] = {} if self._new_id is None else {"new_id": self._new_id}
        cap = self.cap
        metrics = ServerMetrics(_title(served), settings.metrics, self._counts)
        executor = Executor(cap)
        sessions = SessionTable(
            served.factory, cap, executor, settings, self._slots, metrics=metrics, **extra
        )
        self.state.sessions = sessions
        production = settings.mode == "production"
        schemas = describe_each(served.models)
        encoder = ObservationEncoder(schemas["observation"], schemas["reset_observation"])
        decoder: RequestDecoder[Any] = RequestDecoder(served.action, production=production)
        tooling = Tooling(served.factory, served.action)
        rpc = JsonRpc(sessions, tooling)
        sockets = Sockets()
        frames = FrameDialect(decoder, rpc, metrics)
        links = Links(
            sessions,
            decoder,
            frames,
            BatchDialect(decoder, encoder, metrics),
            production=production,
            send_timeout_s=settings.send_timeout_s,
        )
        # Routes that the environment's author adds come after ours, whenever they were added.
        added = self.router.routes[self._own_route_count :]
        del self.router.routes[self._own_route_count :]
        # Plain Starlette routes: FastAPI would do nothing for these, and double the time of each request.
        send_timeout_s = settings.send_timeout_s
        unlisted_routes: list[BaseRoute] = [
            WebSocketRoute(SESSION_PATH, SocketRoute(sessions, frames, sockets, send_timeout_s, links)),
            WebSocketRoute(MCP_PATH, SocketRoute(sessions, RpcDialect(rpc), sockets, send_timeout_s)),
            Route(MCP_PATH, rpc.serve, methods=["POST"]),
        ]
        if settings.metrics:
            unlisted_routes.append(Route(METRICS_PATH, metrics.serve, methods=["GET"]))
        if not production:
            unlisted_routes += HttpRoutes(sessions, decoder).routes()
        self.router.routes.extend(unlisted_routes)
        metadata = MetadataSource(sessions, served.name)
        page = None
        if served.page is None:
            if settings.web:
                logger.warning("the app has no page: it is not one of create_app")
        elif not production and (settings.web or served.page.always):  # production serves no reset or step
            page = Page(served.page, served.action, sessions, decoder, metadata, _title(served), settings)
            self.router.routes.extend(page.routes())
        # Not by `include_router`, which would build each of these routes a second time.
        self.router.routes += about_router(sessions, schemas, metadata).routes
        self.router.routes += page_router(_title(served), metadata, schemas, self.openapi).routes
        self.router.routes += tasks_router(sessions, _title(served)).routes
        routes = len(self.router.routes) - self._own_route_count
        self.router.routes.extend(added)
        self.openapi_schema = None
        return _Parts(
            routes=routes,
            sessions=sessions,
            tooling=tooling,
            sockets=sockets,
            links=links,
            mcp=McpEntry(sessions, tooling, _title(served), settings),
            guard=Guard(self.serve_admitted, settings, is_open=page.is_open if page else lambda _: False),
            page=page,
        )

    def collect_refusals(self) -> Callable[[], OpenEnvError | None]:
        """Return a function that gives the error that refused the start, if any; the caller reports it, not the log."""
        self._refusal_collected = True
        return lambda: self._refusal

    async def drain(self, deadline_s: float) -> None:
        """Refuse new sessions and end the open ones, after the calls in progress.

        Args:
            deadline_s: Seconds to wait for the calls in progress.
        """
        deadline = asyncio.get_running_loop().time() + deadline_s
        parts = self._ensure_built()
        parts.sessions.draining = True
        parts.sockets.start_draining()  # before anything is awaited: a reply in between would begin a request
        await asyncio.gather(parts.sockets.wait_drained(deadline), parts.links.close())
        await parts.sessions.end_standing(deadline)
        await parts.mcp.drain(deadline)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        self._ensure_built()
        if self.openapi_schema is None:
            self.openapi_schema = describe_api(
                super().openapi(), self.served.models, production=self.settings.mode == "production"
            )
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the application's lifespan."""
        if scope["type"] == "lifespan":
            await self.serve_admitted(scope, receive, send)
        else:
            await self._ensure_built().guard(scope, receive, send)

    async def serve_admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection that the guard has admitted, or the application's lifespan."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, self._without_traceback(send))
            return
        parts = self._ensure_built()
        path = path_of(scope)
        metrics = parts.sessions.metrics
        if metrics.enabled and scope["type"] == "http" and path.startswith(_SESSION_PATHS):
            receive, send = metrics.wrap_http(receive, send)
        await super().__call__(scope, receive, send)

    async def mcp(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request to /mcp: by standard MCP, or by `app` if it is of the released dialect."""
        await self._ensure_built().mcp(app, scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the app and stop it afterwards, as its lifespan. It may be served again after its server has stopped.

        Raises:
            ConfigurationError: The settings are invalid for this app.
            Exception: Whatever the author's lifespan raised.
        """
        self._refusal = None
        try:
            parts = self._ensure_built()
        except OpenEnvError as error:
            self._refusal = error
            raise
        self._started = True
        parts.sessions.draining = parts.sockets.draining = False
        parts.sessions.metrics.start()
        lifespan = self.served.lifespan
        try:
            async with (
                nullcontext() if lifespan is None else lifespan(self),
                nullcontext() if parts.page is None else parts.page.lifespan(),
            ):
                try:
                    yield
                finally:
                    await parts.links.close()
                    await parts.sessions.shut_down()
                    await parts.mcp.stop()
                    parts.sessions.metrics.stop()
        except OpenEnvError as error:
            self._refusal = error
            raise
        finally:
            parts.sessions.executor.close()
            self._started = False

    def _without_traceback(self, send: Send) -> Send:
        """Return a `send` that reports a start refused with an `OpenEnvError` by its message, without a traceback."""

        async def send_refusal(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self._refusal is not None:
                message = {**message, "message": "" if self._refusal_collected else str(self._refusal)}
            await send(message)

        return send_refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The parts of an app, built from its settings. `routes` is the number of routes without those of its author."""

    routes: int
    sessions: SessionTable
    tooling: Tooling
    sockets: Sockets
    links: Links
    mcp: McpEntry
    guard: Guard
    page: Page | None


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    assert isinstance(app, EnvironmentApp)
    async with app.running():
        yield


def _title(served: AppSettings) -> str:
    return served.name or name_of(served.factory)


def _check_cap(factory: Factory, cap: int) -> None:
    if cap < 1:
        raise ConfigurationError(f"expected a cap on sessions of at least 1, got {cap}")
    if cap > 1 and isinstance(factory, type) and not getattr(factory, "SUPPORTS_CONCURRENT_SESSIONS", False):
        raise ConfigurationError(
            f"expected a cap of 1 session for {factory.__name__}, got {cap}; if several instances can live in "
            "one process, set SUPPORTS_CONCURRENT_SESSIONS = True on the class"
        )


def create_app(
    env: Factory,
    action_cls: Any = None,
    observation_cls: Any = None,
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    gradio_builder: Any = None,
    custom_tab_name: str | None = None,
    custom_tab_primary: bool | None = None,
    show_default_tab: bool | None = None,
    title_override: str | None = None,
    state_cls: type[State] | None = None,
    *,
    mode: Mode | None = None,
    reset_observation_cls: Any = None,
    lifespan: Lifespan | None = None,
) -> EnvironmentApp:
    """Build the server of one environment.

    All other settings come from environment variables (`ServerSettings.from_environment`). ROPEWALK_MAX_SESSIONS
    overrides the cap given here: it describes the machine, and this the code.

    Args:
        env: The environment class, or a callable without arguments that returns an environment.
        action_cls: The action model; by default that of the class: `class Dice(Environment[Guess, Face])`.
        observation_cls: The observation model; likewise.
        env_name: Name of the environment; by default that of its class.
        max_concurrent_envs: Greatest number of concurrent sessions. By default 1, or 1024 for a class whose episodes
            the base keeps (`Environment.KEEPS_EPISODES`) and that allows several instances.
        concurrency_config: The same, with the idle timeout of sessions without a WebSocket.
        gradio_builder: Makes a page with Gradio (the extra `gradio`), shown at /web if the page is enabled. It is
            called with what resets and steps, the action's fields, the metadata, whether it is a chat, a title, and
            how to connect, and returns a `gradio.Blocks`.
        custom_tab_name: Title of that page's tab, beside the standard one; by default "Custom".
        custom_tab_primary: Whether its tab is the first.
        show_default_tab: Whether the standard page is shown beside it; by default True.
        title_override: Heading of the page; by default the environment's name.
        state_cls: The state model, for the schema; by default that of the class.
        mode: `production` serves no reset, step or state; by default the value of OPENENV_MODE.
        reset_observation_cls: Model of what a reset returns, for the schema, if it is not `observation_cls`.
        lifespan: Makes what the environments share. Called with the app, it returns a context that is entered
            when a server process starts, before it accepts connections, and exited when that ends, after its last
            session. An `OpenEnvError` from it refuses the start with its message. If the app is mounted in another
            application, that one has to run it, by `app.router.lifespan_context(app)`. Each worker has its own.

    Raises:
        ConfigurationError: The settings contradict each other, or the class does not allow several sessions.
        TypeError: `env` is an instance.
    """
    if not callable(env):
        raise TypeError(
            "env must be a callable, the environment's class or a function that returns an environment, got an "
            f"instance of {type(env).__name__}; each session has one of its own, so give the class"
        )
    settings = ServerSettings.from_environment(os.environ)
    if concurrency_config is not None:
        if max_concurrent_envs is not None:
            raise ConfigurationError("both max_concurrent_envs and concurrency_config are given; give one")
        max_concurrent_envs = concurrency_config.max_concurrent_envs
        if concurrency_config.session_timeout is not None:
            settings = replace(settings, idle_timeout_s=concurrency_config.session_timeout)
    if mode is not None:
        if mode not in MODES:
            raise ConfigurationError(f"expected mode to be one of {', '.join(MODES)}, got {mode!r}")
        # By its plain value: folders written for the released package give a member of an enum of strings.
        settings = replace(settings, mode="production" if mode == "production" else "simulation")
    cap = default_cap(env) if max_concurrent_envs is None else max_concurrent_envs
    game: Any = env
    if isinstance(game, type) and issubclass(game, MultiAgentEnvironment):
        env = seat_environment(game)
    models = read_models(env)
    action_cls, observation_cls = action_cls or models.action, observation_cls or models.observation
    if action_cls is None or observation_cls is None:
        raise ConfigurationError(
            f"the models of {name_of(env)} are unknown; name them in its class, as in "
            "class Dice(Environment[Guess, Face]), or pass them to create_app"
        )
    described = {
        "action": action_cls,
        "observation": observation_cls,
        "state": state_cls or models.state,
        "reset_observation": reset_observation_cls or models.reset_observation or observation_cls,
    }
    page = PageOptions(
        title=title_override,
        builder=gradio_builder,
        tab=custom_tab_name or "Custom",
        tab_first=bool(custom_tab_primary),
        playground=show_default_tab is not False,
    )
    served = AppSettings(
        factory=env, action=action_cls, models=described, name=env_name, cap=cap, lifespan=lifespan, page=page
    )
    return EnvironmentApp(served, settings)


def create_fastapi_app(
    env: Factory,
    action_cls: Any,
    observation_cls: Any,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    env_name: str | None = None,
    state_cls: type[State] | None = None,
    *,
    mode: Mode | None = None,
    reset_observation_cls: Any = None,
) -> EnvironmentApp:
    """Build the same server without a page, under the released name and with its order of parameters."""
    app = create_app(
        env,
        action_cls,
        observation_cls,
        env_name,
        max_concurrent_envs,
        concurrency_config,
        state_cls=state_cls,
        mode=mode,
        reset_observation_cls=reset_observation_cls,
    )
    return EnvironmentApp(replace(app.served, page=None), app.settings)
