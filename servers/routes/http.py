"""Plain HTTP: reset, step and state, each in an environment of its own, and what a server tells of itself."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.errors import EnvironmentFailure
from openenv_core.protocol import replies
from openenv_core.protocol.codes import CAPACITY_REACHED, VALIDATION_ERROR, Refusal
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.requests import (
    RequestDecoder,
    ResetOptions,
    StepOptions,
    plain_details,
    reset_options,
)
from servers.execution import FATAL, end
from servers.sessions import Session, SessionTable

logger = logging.getLogger("servers")

CLIENT_LEFT = 499
"""The status in the log of a request whose client left before its reply; nobody reads it."""

RETRY_AFTER_S = 1


def http_router(
    sessions: SessionTable,
    decoder: RequestDecoder[Any],
    models: dict[str, Any],
    metadata: Callable[[], Awaitable[EnvironmentMetadata]],
) -> APIRouter:
    """Return the plain HTTP routes of one environment.

    Args:
        sessions: Where sessions come from; each request takes one for as long as it lasts.
        decoder: Reads actions.
        models: The models to describe, under the keys of /schema.
        metadata: Tells of the environment.
    """
    router = APIRouter()
    schemas = {name: describe(model) for name, model in models.items()}

    async def in_session(request: Request, work: Callable[[Session], Awaitable[bytes]]) -> Response:
        return await _while_connected(request, _respond(sessions, work))

    @router.post("/reset")
    async def reset(request: Request, options: ResetOptions | None = None) -> Response:
        """Start an episode in an environment of its own and return the first observation."""

        async def work(session: Session) -> bytes:
            return replies.encode_http_result(await session.runner.reset(reset_options(options)))

        return await in_session(request, work)

    @router.post("/step")
    async def step(request: Request, body: StepOptions) -> Response:
        """Apply an action in an environment of its own and return what follows."""
        try:
            action = decoder.action(body.action)
        except Refusal as refusal:
            return _refused(refusal)
        options = {name: getattr(body, name) for name in body.model_fields_set if name != "action"}

        async def work(session: Session) -> bytes:
            return replies.encode_http_result(await session.runner.step(action, options))

        return await in_session(request, work)

    @router.get("/state")
    async def state(request: Request) -> Response:
        """Return the state of an environment of its own."""

        async def work(session: Session) -> bytes:
            return replies.encode_model(await session.runner.state())

        return await in_session(request, work)

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Tell that the server answers."""
        return {"status": "healthy"}

    @router.get("/metadata")
    async def get_metadata() -> EnvironmentMetadata:
        """Tell of the environment."""
        return await metadata()

    @router.get("/schema")
    async def schema() -> dict[str, Any]:
        """Return the JSON schemas of actions, observations and state."""
        return schemas

    return router


class MetadataSource:
    """Finds an environment's metadata once; an instance is made only where its class has its own way.

    Args:
        sessions: Where an instance comes from.
        name: The name that the server was given, if any.
    """

    def __init__(self, sessions: SessionTable, name: str | None) -> None:
        self._sessions = sessions
        self._name = name
        self._found: EnvironmentMetadata | None = None

    async def __call__(self) -> EnvironmentMetadata:
        """Return the metadata; while every session is taken, what the class alone tells."""
        if self._found is not None:
            return self._found
        factory = self._sessions.factory
        if getattr(factory, "get_metadata", None) is Environment.get_metadata:
            self._found = self._default()
            return self._found
        try:
            async with self._sessions.session() as session:
                self._found = EnvironmentMetadata.model_validate(await session.runner.call("get_metadata"))
        except Refusal:
            return self._default()
        except FATAL:
            logger.exception("get_metadata failed")
            return self._default()
        return self._found

    def _default(self) -> EnvironmentMetadata:
        factory = self._sessions.factory
        own_name = getattr(factory, "__name__", type(factory).__name__)
        return EnvironmentMetadata(
            name=self._name or own_name, description=inspect.cleandoc(factory.__doc__ or own_name)
        )


class _Lenient(GenerateJsonSchema):
    """Describes arrays and other foreign types as anything, instead of failing."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def describe(model: Any) -> dict[str, Any]:
    """Return the JSON schema of a model, or of a union of models."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_json_schema(schema_generator=_Lenient)
    return TypeAdapter(model).json_schema(schema_generator=_Lenient)


async def validation_failed(_: Request, error: Exception) -> Response:
    """Answer a body that does not validate; whatever it held, the answer is JSON."""
    details = plain_details(list(error.errors())) if isinstance(error, RequestValidationError) else []
    return _json(dumps({"detail": details}), 422)


async def _respond(sessions: SessionTable, work: Callable[[Session], Awaitable[bytes]]) -> Response:
    """Do the work in a session and return the reply, whatever happens."""
    try:
        async with sessions.session() as session:
            return _json(await work(session))
    except Refusal as refusal:
        return _refused(refusal)
    except FATAL as error:
        if not isinstance(error, EnvironmentFailure):
            logger.error("the environment raised", exc_info=error)
        return _json(dumps({"detail": str(error) or type(error).__name__}), 500)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work`, but cancel it when the client leaves."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_LEFT)
    finally:
        await end(watch)
        await end(task)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(refusal: Refusal) -> Response:
    if refusal.code == VALIDATION_ERROR:
        return _json(dumps({"detail": refusal.extra["errors"]}), 422)
    body = dumps({"detail": {"message": refusal.message, "code": refusal.code, **refusal.extra}})
    if refusal.code == CAPACITY_REACHED:
        return _json(body, 503, {"Retry-After": str(RETRY_AFTER_S)})
    return _json(body, 500)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")
