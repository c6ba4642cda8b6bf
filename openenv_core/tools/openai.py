"""Tools as chat templates and OpenAI-style services take them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.tools.specs import ToolSpec
from openenv_core.tools.wire import Tool

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a function may be called."""


def openai_tools(tools: Iterable[Tool | ToolSpec | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return function schemas for `tools=` of a chat template, or of a service that speaks like OpenAI's.

    Args:
        tools: As a client lists them, as an environment declares them, or as dicts with `input_schema` or MCP's
            `inputSchema`; other keys are left out. Schemas stay as they are, `$defs` and `$ref` included.

    Raises:
        ConfigurationError: Something is no tool, two have one name, or a name is none that a model could call: MCP
            allows dots and slashes, functions do not. Rename the tool, by a prefix without them for instance.
    """
    functions = [_function(tool) for tool in tools]
    names = [function["name"] for function in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigurationError(f"expected tools of different names, got several called {sorted(twice)}")
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
    # A function without parameters still needs an object with none, or services refuse it.
    parameters = {"type": "object", "properties": {}, **(schema or {})}
    return {"name": name, "description": description or "", "parameters": parameters}
