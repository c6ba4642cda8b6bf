"""The routes of the page; its static files need no token, since they contain nothing of the environment."""

import inspect
import os
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from openenv_core import EnvironmentMetadata, pages
from openenv_core.manifest import MANIFEST
from openenv_core.protocol.frames import RequestDecoder
from openenv_core.protocol.jsonio import dumps
from servers.execution import Factory
from servers.page.gradio import PageOptions, build
from servers.page.manager import WebInterfaceManager
from servers.routes.about import MetadataSource
from servers.routes.description import describe, describe_reset
from servers.routes.http import json_answer, path_of
from servers.security import owner_of
from servers.sessions import SessionTable
from servers.settings import ServerSettings

PAGE_PATH: Final = "/web"
"""Path of the page, as in the released server."""

PLAYGROUND_PATH: Final = "/playground"
"""Path of the page, shown in a tab, when the author's own page is at `PAGE_PATH`."""

_SCRIPTS: Final = ("elements", "theme", "shortcuts", "values", "session", "form", "chart", "game", "main")
"""In order: each uses those before it."""

_HUB: Final = "https://huggingface.co"
"""Origin of the pages that show a Space in a frame."""

_README_VARIABLE: Final = "ENV_README_PATH"
_IMAGE_READMES: Final = ("/app/env/README.md", "/app/README.md")
"""Paths of the README in images of environments."""


class Page:
    """The page of one server.

    Raises:
        ConfigurationError: The author's page needs Gradio, which is not installed.
        TypeError: The author's builder did not return Gradio blocks.
    """

    def __init__(
        self,
        options: PageOptions,
        action: Any,
        sessions: SessionTable,
        decoder: RequestDecoder[Any],
        metadata: MetadataSource,
        name: str,
        settings: ServerSettings,
    ) -> None:
        self._title = options.title or name
        self._action = action
        self._factory = factory = sessions.factory
        self._name = name
        self._metadata = metadata
        self._idle_timeout_s = settings.idle_timeout_s
        self._headers = _headers(settings)
        self._manager = WebInterfaceManager(sessions, decoder, action, self.about, settings.send_timeout_s)
        self._path = PAGE_PATH if options.builder is None else PLAYGROUND_PATH
        self._files = {
            "": ("text/html", pages.asset(__package__, "page.html")),
            "page.css": ("text/css", pages.style(__package__)),
            "page.js": ("text/javascript", pages.script(__package__, _SCRIPTS)),
        }
        self._authors: Any = None
        if options.builder is not None:
            about = with_readme(metadata.class_metadata(), factory, name)
            self._authors = build(options, self._manager, about, describe(action), f"..{PLAYGROUND_PATH}/")

    def routes(self) -> list[BaseRoute]:
        """Return the routes, in the order in which they are matched."""
        redirects = [Route(path, self._redirect) for path in ("/", PAGE_PATH)]
        files = [Route(f"{self._path}/{name}", self._file) for name in self._files]
        own = [*files, Route(f"{self._path}/page.json", self._describe)]
        authors = [] if self._authors is None else self._authors.routes
        return [*redirects, *own, *self._manager.routes(), *authors]

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the context manager to hold while the page is served."""
        if self._authors is None:
            return nullcontext()
        return self._authors.router.lifespan_context(self._authors)  # type: ignore[no-any-return]

    def is_open(self, scope: Scope) -> bool:
        """Whether a request needs no token: a browser cannot send one before it has loaded the page."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        path = path_of(scope)
        place, _, name = path.rpartition("/")
        return path in ("/", PAGE_PATH) or (place == self._path and name in self._files)

    async def about(self, owner: str) -> EnvironmentMetadata:
        """Return the environment's metadata, with its README if one is found."""
        return with_readme(await self._metadata.ask(owner), self._factory, self._name)

    async def _redirect(self, request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}{PAGE_PATH}/")

    async def _file(self, request: Request) -> Response:
        kind, text = self._files[path_of(request.scope).rpartition("/")[2]]
        return Response(text, media_type=kind, headers=self._headers)

    async def _describe(self, request: Request) -> Response:
        metadata = await self.about(owner_of(request.scope))
        body = {
            "title": self._title,
            "about": metadata.model_dump(mode="json"),
            "action": describe(self._action),
            "reset": describe_reset(self._factory),
            "idle_s": self._idle_timeout_s,
        }
        return json_answer(dumps(body), headers=self._headers)


def _headers(settings: ServerSettings) -> dict[str, str]:
    """Return the headers of the page, which allow requests to this server only, and no text as code or markup."""
    framing = ["'self'", *(origin for origin in settings.allowed_origins if origin != "null")]
    if os.environ.get("SPACE_ID"):  # set by the hub
        framing.append(_HUB)
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'; "
        f"frame-ancestors {' '.join(framing)}"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }


def with_readme(about: EnvironmentMetadata, factory: Factory, name: str) -> EnvironmentMetadata:
    """Return the metadata with a README: its own, or else that of the environment's folder or image."""
    if about.readme_content is not None:
        return about
    places = [
        os.environ.get(_README_VARIABLE),
        _find_readme(factory),
        f"envs/{name}/README.md",
        *_IMAGE_READMES,
    ]
    for path in filter(None, places):
        try:
            return about.model_copy(update={"readme_content": Path(path).read_text(encoding="utf-8")})
        except (OSError, ValueError):
            continue
    return about


def _find_readme(factory: Factory) -> str | None:
    """Return the path where a README would be beside the environment's manifest; None without a manifest."""
    try:
        folder = Path(inspect.getfile(inspect.unwrap(factory))).parent
    except (OSError, TypeError):
        return None
    for parent in (folder, *list(folder.parents)[:3]):
        if (parent / MANIFEST).is_file():
            return str(parent / "README.md")
    return None
