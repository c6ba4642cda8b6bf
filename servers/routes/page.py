"""The page for people: what a server serves and how to use it, in plain HTML that needs nothing from elsewhere."""

import json
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from servers.routes.about import MetadataSource
from servers.routes.description import describe
from servers.security.guard import owner_of

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}pre{overflow:auto;padding:.8rem;border:1px solid #8884;font-size:.85rem}"
    "summary{cursor:pointer}"
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_MODELS: Final = {
    "action": "Action",
    "observation": "Observation",
    "reset_observation": "Observation of a reset",
}


def page_router(
    title: str, metadata: MetadataSource, models: dict[str, Any], document: Callable[[], dict[str, Any]]
) -> APIRouter:
    """Return the routes of the page: `/` and where frameworks have their documentation.

    Args:
        title: What the server is called.
        metadata: Tells of the environment.
        models: The models to describe, under the keys of /schema.
        document: Returns the OpenAPI document.
    """
    router = APIRouter(include_in_schema=False)
    schemas = {name: describe(models[key]) for key, name in _MODELS.items()}

    async def page(request: Request) -> Response:
        told = await metadata.ask(owner_of(request.scope))
        url = str(request.base_url).rstrip("/")
        text = "".join(_page(title, told.description, url, schemas, document()))
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
        yield _folded(name, schema)
    yield '<h2>HTTP</h2><p>Episodes are played on <code>/ws</code>; <a href="openapi.json">openapi.json</a>.</p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            about = operation.get("description") or operation.get("summary", "")
            shown = {name: operation[name] for name in ("requestBody", "responses") if name in operation}
            yield _folded(f"{method.upper()} {path}: {about}", shown)


def _folded(summary: str, content: Any) -> str:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
