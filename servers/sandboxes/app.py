"""The service of sandboxes as an ASGI application: routes that translate, behind the guard of all our servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from openenv_core.errors import ConfigurationError, OpenEnvError, describe_faults
from openenv_core.providers.remote import (
    MAX_LOG_BYTES,
    MAX_WAIT_S,
    ROOT,
    LeaseRequest,
    RemoteSandbox,
    SandboxSpec,
)
from servers.sandboxes.backends import Backend, local_backend
from servers.sandboxes.limits import SandboxLimits, SandboxRefusalError
from servers.sandboxes.table import SandboxTable
from servers.security import Guard, owner_of
from servers.settings import MAKE_TOKEN, ServerSettings

ModelT = TypeVar("ModelT", bound=BaseModel)


class SandboxApp(FastAPI):
    """The application. It asks everybody for a token.

    Raises:
        ConfigurationError: The settings have no token.
    """

    def __init__(
        self, settings: ServerSettings, limits: SandboxLimits, backend: Backend = local_backend
    ) -> None:
        if not settings.tokens:
            raise ConfigurationError(
                "expected a token, got none: whoever reaches a service of sandboxes runs what they like; give "
                f"--token-file or ROPEWALK_TOKENS (make one with: {MAKE_TOKEN})"
            )
        super().__init__(title="Ropewalk sandboxes", version="1", lifespan=_lifespan)
        self._guard = Guard(super().__call__, settings)
        self._drain_s = settings.drain_s
        self.table = SandboxTable(backend, limits)
        self.include_router(_router(self.table))
        self.add_exception_handler(SandboxRefusalError, _refused)
        self.add_exception_handler(OpenEnvError, _failed)

    async def drain(self, deadline_s: float | None = None) -> None:
        """End every sandbox."""
        await self.table.close(self._drain_s if deadline_s is None else deadline_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the application's lifespan."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            await self._guard(scope, receive, send)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    assert isinstance(app, SandboxApp)
    try:
        yield
    finally:
        await app.drain()


def _router(table: SandboxTable) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Tell that the service runs."""
        return {"status": "healthy"}

    @router.post(ROOT, status_code=201, openapi_extra=_body_of(SandboxSpec))
    async def create(request: Request, response: Response) -> RemoteSandbox:
        """Begin to start a sandbox."""
        spec = await _read(request, SandboxSpec)
        made = table.create(owner_of(request.scope), spec)
        response.headers["Location"] = f"{request.scope.get('root_path', '')}{ROOT}/{made.id}"
        return made

    @router.get(ROOT + "/{sandbox_id}")
    async def get(request: Request, sandbox_id: str, wait_s: float = 0.0) -> RemoteSandbox:
        """Tell of a sandbox; while it starts, after at most `wait_s` seconds."""
        wait_s = min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0  # NaN is not above 0
        return await table.get(owner_of(request.scope), sandbox_id, wait_s)

    @router.post(ROOT + "/{sandbox_id}/lease", openapi_extra=_body_of(LeaseRequest))
    async def renew(request: Request, sandbox_id: str) -> RemoteSandbox:
        """Let a sandbox live on."""
        lease = await _read(request, LeaseRequest)
        return await table.renew(owner_of(request.scope), sandbox_id, lease.lease_s)

    @router.get(ROOT + "/{sandbox_id}/logs")
    async def logs(request: Request, sandbox_id: str) -> PlainTextResponse:
        """Return the last of what a sandbox has printed; `bytes` of it at most."""
        asked = request.query_params.get("bytes", str(MAX_LOG_BYTES))
        if not asked.isascii() or not asked.isdigit() or not 0 < len(asked) < 10 or int(asked) < 1:
            raise SandboxRefusalError(422, "invalid", "expected bytes to be a whole number of at least 1")
        text = await table.logs(owner_of(request.scope), sandbox_id, int(asked))
        return PlainTextResponse(text, headers={"X-Content-Type-Options": "nosniff"})

    @router.delete(ROOT + "/{sandbox_id}", status_code=204)
    async def delete(request: Request, sandbox_id: str) -> None:
        """End a sandbox."""
        await table.delete(owner_of(request.scope), sandbox_id)

    return router


async def _read(request: Request, model: type[ModelT]) -> ModelT:
    """Read the body, which the guard has bounded."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise SandboxRefusalError(415, "invalid", "expected a body of type application/json, got another")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        faults = describe_faults(error, "body")
        raise SandboxRefusalError(
            422, "invalid", f"expected a {model.__name__} of docs/sandboxes.md, got: {faults}"[:4000]
        ) from None


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": model.model_json_schema()}},
        }
    }


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SandboxRefusalError)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse({"detail": str(error), "code": error.code}, error.status, headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    """Answer for what runs the sandboxes: an engine that does not answer, for one."""
    return JSONResponse({"detail": str(error), "code": type(error).__name__}, 503)
