"""create_app: assembles routes and sessions into one ASGI application, and nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope, Send

from openenv_core import ConfigurationError, State
from openenv_core.protocol.requests import RequestDecoder
from servers.execution import Executor, Factory
from servers.routes.http import MetadataSource, http_router, validation_failed
from servers.routes.websocket import WebSocketRoute
from servers.sessions import SessionTable

API_VERSION = "1.0.0"
"""Version of the HTTP interface. Released validators choose their profile by its first number."""


SESSION_PATH = "/ws"


class EnvironmentApp(FastAPI):
    """A FastAPI app whose session socket goes around the framework.

    The framework wraps every send of a socket, which would be a quarter of the time of a trivial step.

    Attributes:
        session_socket: Serves SESSION_PATH.
    """

    session_socket: WebSocketRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the application's lifespan."""
        if scope["type"] == "websocket" and _path(scope) == SESSION_PATH:
            await self.session_socket(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _path(scope: Scope) -> str:
    """Return the path without what a parent app, if any, has mounted this one under."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def create_app(
    env: Factory,
    action_cls: Any,
    observation_cls: Any,
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    state_cls: type[State] | None = None,
) -> EnvironmentApp:
    """Build the server of one environment.

    Args:
        env: The environment class, or a callable without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        env_name: What the environment is called; by default the name of its class.
        max_concurrent_envs: The greatest number of sessions at once; 1 by default.
        state_cls: The state model, for the schema.

    Raises:
        ConfigurationError: The cap is below 1, or the class does not allow several sessions.
    """
    cap = 1 if max_concurrent_envs is None else max_concurrent_envs
    name = env_name or str(getattr(env, "__name__", type(env).__name__))
    if cap < 1:
        raise ConfigurationError(f"expected max_concurrent_envs of at least 1, got {cap}")
    if cap > 1 and isinstance(env, type) and not getattr(env, "SUPPORTS_CONCURRENT_SESSIONS", False):
        raise ConfigurationError(
            f"expected max_concurrent_envs=1 for {env.__name__}, got {cap}; if several instances can live in "
            "one process, set SUPPORTS_CONCURRENT_SESSIONS = True on the class"
        )
    executor = Executor(cap)
    sessions = SessionTable(env, cap, executor)
    decoder: RequestDecoder[Any] = RequestDecoder(action_cls)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        executor.close()

    models = {"action": action_cls, "observation": observation_cls, "state": state_cls or State}
    app = EnvironmentApp(title=name, version=API_VERSION, lifespan=lifespan)
    app.add_exception_handler(RequestValidationError, validation_failed)
    app.include_router(http_router(sessions, decoder, models, MetadataSource(sessions, env_name)))
    app.session_socket = WebSocketRoute(sessions, decoder)
    app.state.sessions = sessions
    return app
