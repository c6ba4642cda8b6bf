"""The descriptions of tools, resources and prompts that clients list."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from openenv_core.errors import ConfigurationError
from openenv_core.tools.wire import Tool

CALL_FIELDS: Final = frozenset({"tool_name", "arguments"})
"""Fields of an action that calls a tool."""


def is_of_tools(schema: Mapping[str, Any]) -> bool:
    """Whether a JSON schema of actions includes tool calls."""
    parts = (schema, *schema.get("$defs", {}).values())
    return any(
        set(variant.get("properties", ())) >= CALL_FIELDS for variant in parts if isinstance(variant, Mapping)
    )


class _Spec(BaseModel):
    """Base class of specs: field names in Python's style, with aliases for MCP's JSON."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        defer_build=True,  # most servers have none
    )

    meta: dict[str, Any] | None = Field(default=None, alias="_meta")

    def to_mcp(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ToolSpec(_Spec):
    """One tool.

    Attributes:
        name: Name, unique in the environment.
        input_schema: JSON schema of the arguments, of type object.
        title: Display name.
        output_schema: JSON schema of the structured result, of type object; None if unspecified.
        annotations: MCP's hints: readOnlyHint, destructiveHint, idempotentHint, openWorldHint.
        meta: Additional metadata, MCP's `_meta`.
    """

    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    title: str | None = None
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None

    def wire(self) -> Tool:
        """Return the tool as a step lists it."""
        return Tool(name=self.name, description=self.description, input_schema=self.input_schema)


class _TitledSpec(_Spec):
    name: str
    title: str | None = None
    description: str | None = None


class ResourceSpec(_TitledSpec):
    """A resource at a URI; `mime_type` is the type of its content."""

    uri: str
    mime_type: str | None = None


class ResourceTemplateSpec(_TitledSpec):
    """Resources whose URIs match a template.

    Attributes:
        uri_template: RFC 6570 template: `notes://{name}`, or `files://{+path}` for a value with slashes.
        mime_type: Type of the content.
    """

    uri_template: str
    mime_type: str | None = None


class PromptArgument(_Spec):
    """One argument of a prompt."""

    name: str
    description: str | None = None
    required: bool = False


class PromptSpec(_TitledSpec):
    """A prompt: the first messages of a conversation."""

    arguments: tuple[PromptArgument, ...] = ()


NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that models accept for functions."""


def openai_tools(tools: Iterable[Tool | ToolSpec | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return function schemas for the argument `tools` of a chat template or an OpenAI-compatible API.

    Args:
        tools: Tools as a client lists them or an environment declares them, or dicts with `input_schema` or MCP's
            `inputSchema`; other keys are ignored. Schemas are not changed, `$defs` and `$ref` included.

    Raises:
        ConfigurationError: An entry is not a tool, two have the same name, or a name is not valid for a function: MCP
            allows dots and slashes, functions do not.
    """
    functions = [_function(tool) for tool in tools]
    names = [function["name"] for function in functions]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ConfigurationError(
            f"expected tools of different names, got several called {sorted(duplicates)}"
        )
    return [{"type": "function", "function": function} for function in functions]


def _function(tool: Tool | ToolSpec | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        name, description = tool.get("name"), tool.get("description")
        schema = tool.get("input_schema", tool.get("inputSchema"))
    else:
        name, description, schema = tool.name, tool.description, tool.input_schema
    if not isinstance(name, str):
        raise ConfigurationError(f"expected a tool with a name, got {tool!r:.200}")
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"expected a tool's name of 1 to 64 letters, digits, dashes and underscores, as functions have them, got "
            f"{name!r}; give the tool another name"
        )
    if schema is not None and not isinstance(schema, Mapping):
        raise ConfigurationError(f"expected a JSON schema of the tool {name!r}, got {schema!r:.200}")
    # Services reject a function without parameters unless its schema is an empty object.
    parameters = {"type": "object", "properties": {}, **(schema or {})}
    return {"name": name, "description": description or "", "parameters": parameters}
