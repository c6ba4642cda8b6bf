"""`create_app`: assembles routes, sessions and security into one ASGI application."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_core import ConcurrencyConfig, ConfigurationError, State
from openenv_core.errors import OpenEnvError
from openenv_core.lifecycle import default_cap, read_models
from openenv_core.multi_agent import MultiAgentEnvironment
from openenv_core.protocol.batch import ObservationEncoder
from openenv_core.protocol.frames import RequestDecoder
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
from servers.routes.websocket import SESSION_PATH, FrameConversation, RpcConversation, SocketRoute, Sockets
from servers.seats import seat_environment
from servers.security import Guard
from servers.sessions import SessionSlots, SessionTable, new_session_id
from servers.settings import Mode, ServerSettings, read_mode
from servers.tooling import Tooling

logger = logging.getLogger("servers")

_API_VERSION: Final = "1.0.0"
"""Version of the HTTP interface. Released validators choose their profile by its major number."""


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


class _SocketMiddleware:
    """Passes our sockets, which middleware of the app's author has let through, to the router.

    The framework's own middleware wraps every send of a WebSocket, which would take a quarter of a trivial step's time.
    """

    def __init__(self, app: ASGIApp, owner: "EnvironmentApp") -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_ours = scope["type"] == "websocket" and path_of(scope) in _SOCKET_PATHS
        await (self._owner.router if is_ours else self._app)(scope, receive, send)


class EnvironmentApp(FastAPI):
    """The server of one environment. Routes and middleware that its author adds come before and after ours.

    Args:
        served: What the app serves.
        settings: The server's settings.
        slots: Counts sessions; by default those of this process only.
        new_id: Generates session ids; by default uuid4.
        counts: Counters shared by several processes; by default this process counts alone.

    Attributes:
        served: What the app serves; the checker reads it.
        settings: The server's settings.
        sessions: The app's sessions.
        tooling: Lists and calls the environments' tools.
        sockets: The conversations of the open WebSockets.
        links: The clients of `ropewalk.v1`.
        mcp: Serves /mcp over HTTP.

    Raises:
        ConfigurationError: The class does not allow so many sessions, or a setting is malformed.
    """

    def __init__(
        self,
        served: AppSettings,
        settings: ServerSettings,
        *,
        slots: SessionSlots | None = None,
        new_id: Callable[[], str] = new_session_id,
        counts: SharedCounts | None = None,
    ) -> None:
        cap = settings.max_sessions or served.cap
        _check_cap(served.factory, cap)
        title = served.name or name_of(served.factory)
        super().__init__(
            title=title,
            version=_API_VERSION,
            lifespan=lambda _: self.running(),
            docs_url=None,
            redoc_url=None,
            middleware=[Middleware(_SocketMiddleware, owner=self)],
        )
        self.served = served
        self.settings = settings
        self._refusal: OpenEnvError | None = None
        self._refusal_collected = False
        metrics = ServerMetrics(title, settings.metrics, counts)
        self.sessions = SessionTable(
            served.factory, cap, Executor(cap), settings, slots, new_id=new_id, metrics=metrics
        )
        self.state.sessions = self.sessions
        self.tooling = Tooling(served.factory, served.action)
        schemas = describe_each(served.models)
        decoder: RequestDecoder[Any] = RequestDecoder(
            served.action, self._in_production, getattr(served.factory, "SEAT_ACTIONS", None)
        )
        rpc = JsonRpc(self.sessions, self.tooling)
        self.sockets = Sockets(self.sessions, decoder, rpc, settings.send_timeout_s)
        encoder = ObservationEncoder(schemas["observation"], schemas["reset_observation"])
        batches = BatchDialect(decoder, encoder, metrics)
        self.links = Links(self.sockets, decoder, rpc, batches, production=self._in_production)
        self.mcp = McpEntry(self.sessions, self.tooling, rpc, title, settings)
        metadata = MetadataSource(self.sessions, served.name)
        self._page: Page | None = None
        if served.page is None:
            if settings.web:
                logger.warning("the app has no page: it is not one of create_app")
        elif not self._in_production and (
            settings.web or served.page.always
        ):  # production serves no reset or step
            self._page = Page(served.page, served.action, self.sessions, decoder, metadata, title, settings)
        self._guard = Guard(
            self.serve_admitted, settings, is_open=self._page.is_open if self._page else lambda _: False
        )
        # Plain Starlette routes where FastAPI would do nothing but double the time of each request.
        self.router.routes += [
            WebSocketRoute(SESSION_PATH, SocketRoute(FrameConversation, self.sockets, self.links)),
            WebSocketRoute(MCP_PATH, SocketRoute(RpcConversation, self.sockets)),
            *self.mcp.routes(),
            *([Route(METRICS_PATH, metrics.serve, methods=["GET"])] if settings.metrics else []),
            *([] if self._in_production else HttpRoutes(self.sessions, decoder).routes()),
            *([] if self._page is None else self._page.routes()),
            # Not by `include_router`, which would build each of these routes a second time.
            *about_router(self.sessions, schemas, metadata).routes,
            *page_router(title, metadata, schemas, self.openapi).routes,
            *tasks_router(self.sessions, title).routes,
        ]

    @property
    def _in_production(self) -> bool:
        return self.settings.mode == "production"

    def collect_refusals(self) -> Callable[[], OpenEnvError | None]:
        """Return a function that gives the error that refused the start, if any; the caller reports it, not the log."""
        self._refusal_collected = True
        return lambda: self._refusal

    def cordon(self) -> None:
        """Refuse new sessions; the open ones go on."""
        self.sessions.draining = True

    async def drain(self, deadline_s: float) -> None:
        """Refuse new sessions and end the open ones, after the calls in progress.

        Args:
            deadline_s: Seconds to wait for the calls in progress.
        """
        deadline = asyncio.get_running_loop().time() + deadline_s
        self.sessions.draining = True
        self.sockets.start_draining()  # before anything is awaited: a reply in between would begin a request
        await asyncio.gather(self.sockets.wait_drained(deadline), self.links.close())
        await self.sessions.end_standing(deadline)
        await self.mcp.drain(deadline)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            self.openapi_schema = describe_api(
                super().openapi(), self.served.models, production=self._in_production
            )
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the application's lifespan."""
        await (self.serve_admitted if scope["type"] == "lifespan" else self._guard)(scope, receive, send)

    async def serve_admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection that the guard has admitted, or the application's lifespan."""
        if scope["type"] == "lifespan":
            send = self._without_traceback(send)
        await super().__call__(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the app and stop it afterwards, as its lifespan. It may be served again after its server has stopped.

        Raises:
            Exception: Whatever the author's lifespan raised.
        """
        self._refusal = None
        self.sessions.draining = self.sockets.draining = False
        self.sessions.metrics.start()
        lifespan = self.served.lifespan
        try:
            async with (
                nullcontext() if lifespan is None else lifespan(self),
                nullcontext() if self._page is None else self._page.lifespan(),
            ):
                try:
                    yield
                finally:
                    await self.links.close()
                    await self.sessions.shut_down()
                    await self.mcp.stop()
                    self.sessions.metrics.stop()
        except OpenEnvError as error:
            self._refusal = error
            raise
        finally:
            self.sessions.executor.close()

    def _without_traceback(self, send: Send) -> Send:
        """Return a `send` that reports a start refused with an `OpenEnvError` by its message, without a traceback."""

        async def send_refusal(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self._refusal is not None:
                message = {**message, "message": "" if self._refusal_collected else str(self._refusal)}
            await send(message)

        return send_refusal


def _check_cap(factory: Factory, cap: int) -> None:
    if cap < 1:
        raise ConfigurationError(f"expected a cap on sessions of at least 1, got {cap}")
    if cap > 1 and isinstance(factory, type) and not getattr(factory, "SUPPORTS_CONCURRENT_SESSIONS", False):
        raise ConfigurationError(
            f"expected a cap of 1 session for {factory.__name__}, got {cap}; if several instances can live in "
            "one process, set SUPPORTS_CONCURRENT_SESSIONS = True on the class"
        )


AppBuilder: TypeAlias = Callable[[AppSettings, ServerSettings], EnvironmentApp]
"""Builds an app from what it serves and its settings."""

_builder: ContextVar[AppBuilder] = ContextVar("builder of apps", default=EnvironmentApp)


@contextmanager
def building_apps(build: AppBuilder) -> Iterator[AppBuilder]:
    """Have `create_app` build apps so while the block runs, by a server that imports one; yield the builder before."""
    before = _builder.get()
    token = _builder.set(build)
    try:
        yield before
    finally:
        _builder.reset(token)


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
        # Folders written for the released package give a member of an enum of strings.
        settings = replace(settings, mode=read_mode("mode", mode))
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
    return _builder.get()(served, settings)


def create_fastapi_app(
    env: Factory,
    action_cls: Any,
    observation_cls: Any,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    env_name: str | None = None,
    state_cls: type[State] | None = None,
    **options: Any,
) -> EnvironmentApp:
    """Build the same server without a page, under the released name and with its order of parameters.

    Args:
        env: As of `create_app`; the others too.
        action_cls: Likewise.
        observation_cls: Likewise.
        max_concurrent_envs: Likewise.
        concurrency_config: Likewise.
        env_name: Likewise.
        state_cls: Likewise.
        options: `mode`, `reset_observation_cls` and `lifespan`.
    """
    released = (env, action_cls, observation_cls, env_name, max_concurrent_envs, concurrency_config)
    with building_apps(lambda served, settings: build(replace(served, page=None), settings)) as build:
        return create_app(*released, state_cls=state_cls, **options)
