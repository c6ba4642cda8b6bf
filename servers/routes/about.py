"""The routes about the server: health, capacity, metadata, schemas, and an HTML page."""

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response

from openenv_core import Environment, EnvironmentMetadata
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.http import DETERMINISTIC, DETERMINISTIC_HEADER
from servers.execution import FATAL, name_of
from servers.routes.description import answer, describe_own, record
from servers.routes.http import answer_request
from servers.security import owner_of
from servers.sessions import MethodRequest, SessionTable

logger = logging.getLogger("servers")

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])

_HEALTH: Final = record({"status": {"enum": ["healthy", "unhealthy"]}})

_ESTIMATE: Final = "Seconds that a new client would wait; null if no session has ended yet."
_CAPACITY: Final = record(
    {
        "slots": {"type": "integer", "description": "Sessions that may be open at once."},
        "in_use": {"type": "integer", "description": "Slots taken."},
        "waiting": {"type": "integer", "description": "Clients in the queue."},
        "estimate_s": {"type": ["number", "null"], "description": _ESTIMATE},
    }
)


def about_router(
    sessions: SessionTable, schemas: dict[str, dict[str, Any]], metadata: "MetadataSource"
) -> APIRouter:
    """Return the routes about the server; `schemas` are those of the environment's models, as /schema returns them."""
    router = APIRouter()

    def get(path: str, text: str, schema: dict[str, Any], **more: Any) -> Callable[[EndpointT], EndpointT]:
        # Without response models: FastAPI takes longer to build these than all routes.
        responses: dict[int | str, Any] = {200: answer(text, schema)}
        responses.update(more)
        return router.get(path, response_model=None, responses=responses)

    @get("/health", "It accepts sessions.", _HEALTH, **{"503": answer("It accepts none.", _HEALTH)})
    async def health(response: Response) -> dict[str, str]:
        """Return whether the server has threads for new sessions: not if abandoned calls occupy too many."""
        if sessions.deterministic:
            response.headers[DETERMINISTIC_HEADER] = DETERMINISTIC
        if not sessions.executor.is_exhausted:
            return {"status": "healthy"}
        response.status_code = 503
        return {"status": "unhealthy"}

    @get("/capacity", "The numbers, over all worker processes.", _CAPACITY)
    async def capacity() -> dict[str, Any]:
        """Return the number of sessions allowed, open and waited for."""
        return sessions.queue.capacity()

    @get("/metadata", "Its name and description.", describe_own(EnvironmentMetadata))
    async def get_metadata(request: Request) -> EnvironmentMetadata:
        """Return the environment's metadata."""
        return await metadata.ask(owner_of(request.scope))

    @get("/schema", "The schemas.", record({name: {"type": "object"} for name in schemas}))
    async def schema() -> dict[str, Any]:
        """Return the JSON schemas of the action, the state, and the observations of steps and of resets."""
        return schemas

    return router


class MetadataSource:
    """Caches the environment's metadata; constructs an instance only if the class overrides `get_metadata`."""

    def __init__(self, sessions: SessionTable, name: str | None) -> None:
        self._sessions = sessions
        self._name = name
        self._metadata: EnvironmentMetadata | None = None

    async def ask(self, owner: str) -> EnvironmentMetadata:
        """Return the metadata; that of the class if no slot is free or `get_metadata` fails.

        An instance takes one of the caller's slots.
        """
        if self._metadata is not None:
            return self._metadata
        factory = self._sessions.factory
        if getattr(factory, "get_metadata", None) is Environment.get_metadata:
            return self.class_metadata()
        try:
            async with self._sessions.session(owner, wait_s=0.0) as session:
                reported_metadata = await answer_request(session, MethodRequest("get_metadata"))
                self._metadata = EnvironmentMetadata.model_validate(reported_metadata)
        except RefusalError:
            return self.class_metadata()
        except FATAL:
            logger.exception("get_metadata failed")
            return self.class_metadata()
        return self._metadata

    def class_metadata(self) -> EnvironmentMetadata:
        """Return the metadata that needs no instance: the name, and the docstring as the description."""
        factory = self._sessions.factory
        own_name = name_of(factory)
        return EnvironmentMetadata(
            name=self._name or own_name, description=inspect.cleandoc(factory.__doc__ or own_name)
        )


_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}pre{overflow:auto;padding:.8rem;border:1px solid #8884;font-size:.85rem}"
    "summary{cursor:pointer}"
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def page_router(
    title: str,
    metadata: MetadataSource,
    schemas: dict[str, dict[str, Any]],
    document: Callable[[], dict[str, Any]],
) -> APIRouter:
    """Return the routes of the HTML page: `/`, and `/docs` and `/redoc` as in FastAPI.

    It shows the `schemas` of the models, which are under the keys of /schema, and the OpenAPI `document`.
    """
    router = APIRouter(include_in_schema=False)

    async def page(request: Request) -> Response:
        reported_metadata = await metadata.ask(owner_of(request.scope))
        url = str(request.base_url).rstrip("/")
        text = "".join(_page(title, reported_metadata.description, url, schemas, document()))
        return Response(text, media_type="text/html", headers={"content-security-policy": _POLICY})

    for path in ("/", "/docs", "/redoc"):
        router.add_api_route(path, page)
    return router


def _page(
    title: str, description: str, url: str, schemas: dict[str, Any], document: dict[str, Any]
) -> Iterator[str]:
    use = (
        f"ropewalk play {url}\n\n"
        "from openenv_core import GenericEnvClient\n\n"
        f'with GenericEnvClient(base_url="{url}").sync() as env:\n'
        "    print(env.reset().observation)"
    )
    yield (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(description)}</p><pre>{escape(use)}</pre>"
    )
    yield "<h2>Models</h2>"
    for name, schema in schemas.items():
        yield _fold(name.replace("_", " ").capitalize(), schema)
    yield '<h2>HTTP</h2><p>Episodes are played on <code>/ws</code>; <a href="openapi.json">openapi.json</a>.</p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            about = operation.get("description") or operation.get("summary", "")
            shown = {name: operation[name] for name in ("requestBody", "responses") if name in operation}
            yield _fold(f"{method.upper()} {path}: {about}", shown)


def _fold(summary: str, content: Any) -> str:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
