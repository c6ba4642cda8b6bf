"""An author's Gradio page, mounted as the released server does; no other module imports Gradio."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from openenv_core import EnvironmentMetadata
from openenv_core.errors import installed_with
from servers.page.manager import WEB_SESSION, WebInterfaceManager
from servers.security import owner_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """The options of the page, as given to `create_app`.

    Attributes:
        title: The title above the page.
        builder: Returns the author's page, as Gradio blocks.
        tab: The name of that page's tab.
        tab_first: Whether that tab is the first, and open.
        playground: Whether our own page has a tab beside it.
        always: Whether there is a page regardless of the settings.
    """

    title: str | None = None
    builder: Callable[..., Any] | None = None
    tab: str
    tab_first: bool = False
    playground: bool = True
    always: bool = False


def build(
    options: PageOptions,
    manager: WebInterfaceManager,
    about: EnvironmentMetadata,
    action: dict[str, Any],
    playground: str,
) -> FastAPI:
    """Return an application with the author's page below `/web`.

    Raises:
        ConfigurationError: Gradio is not installed.
        TypeError: The builder did not return Gradio blocks.
    """
    with installed_with("gradio", "the package that this environment's page is made with", "gradio"):
        import gradio
        from gradio.context import LocalContext

    def visitor() -> tuple[str, str] | None:
        request = LocalContext.request.get(None)
        if request is None:
            return None
        return owner_of(request.request.scope), f"{WEB_SESSION}-{request.session_hash}"

    assert options.builder is not None
    manager.visitor = visitor
    title = options.title or f"OpenEnv Agentic Environment: {about.name}"
    is_chat = "tokens" in action.get("properties", {}) and action["properties"]["tokens"].get("type") is None
    own = options.builder(manager, action_fields(action), about, is_chat, title, _quick_start(about.name))
    if not isinstance(own, gradio.Blocks):
        raise TypeError(f"expected gradio_builder to return a gradio.Blocks, got {type(own).__name__}")
    if options.playground:
        with gradio.Blocks() as usual:
            gradio.HTML(f'<iframe src="{playground}" title="Playground" width="100%" height="900"></iframe>')
        tabs = [(options.tab, own), ("Playground", usual)]
        ordered = tabs if options.tab_first else tabs[::-1]
        own = gradio.TabbedInterface([page for _, page in ordered], tab_names=[name for name, _ in ordered])
    own.title = title
    holder = FastAPI(openapi_url=None)
    gradio.mount_gradio_app(holder, own, path="/web")
    return holder


def action_fields(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of an action in the form that the released server passes to builders of pages."""
    names = {"default_value": "default", "choices": "enum", "min_value": "minimum", "max_value": "maximum"}
    names |= {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}
    return [
        {
            "name": name,
            "type": _input(name, field),
            "required": name in schema.get("required", ()),
            "placeholder": f"Enter {name.replace('_', ' ')}...",
            **dict.fromkeys(("description", "help_text"), field.get("description", "")),
            **{given: field.get(key) for given, key in names.items()},
        }
        for name, field in schema.get("properties", {}).items()
        if name != "metadata"
    ]


def _input(name: str, field: dict[str, Any]) -> str:
    lowered = name.lower()
    if "tokens" in lowered:
        return "tensor"
    if "enum" in field:
        return "select"
    match field.get("type"):
        case "boolean":
            return "checkbox"
        case "integer" | "number":
            return "number"
        case "string" if field.get("maxLength", 0) > 100 or "message" in lowered or "code" in lowered:
            return "textarea"
    return "text"


def _quick_start(name: str) -> str:
    return (
        f"### Connect to {name}\n\n```python\nfrom openenv_core import GenericEnvClient\n\n"
        'with GenericEnvClient(base_url="http://localhost:8000").sync() as env:\n'
        "    print(env.reset().observation)\n```\n"
    )
