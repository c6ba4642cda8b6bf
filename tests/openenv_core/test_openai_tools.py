"""Tools in the form of chat templates."""

import pytest

from openenv_core import ConfigurationError
from openenv_core.tools import Tool, ToolSpec
from openenv_core.tools.specs import openai_tools

TREE = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/Tree"}},
    "required": ["tree"],
    "$defs": {"Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}},
}


def test_every_tool_form_becomes_the_same_function() -> None:
    plant = {"name": "plant", "description": "Plants."}
    for tool in (
        Tool(**plant, input_schema=TREE),
        ToolSpec(**plant, input_schema=TREE, title="Plant", meta={"a": 1}),
        {**plant, "input_schema": TREE},
        {**plant, "inputSchema": TREE, "annotations": {"readOnlyHint": True}},
        ToolSpec(**plant, input_schema=TREE).to_mcp(),
    ):
        assert openai_tools([tool]) == [{"type": "function", "function": {**plant, "parameters": TREE}}]
    for bare in ({"name": "rest"}, {"name": "rest", "description": None, "inputSchema": {}}):
        (function,) = openai_tools([bare])
        assert function["function"]["parameters"] == {"type": "object", "properties": {}}
        assert function["function"]["description"] == ""


def test_tools_without_an_openai_form_are_refused() -> None:
    for name in ("files.read", "a/b", "", "x" * 65, "grüß", "a b", "new\n"):
        with pytest.raises(ConfigurationError, match="give the tool another name"):
            openai_tools([{"name": name}])
    with pytest.raises(ConfigurationError, match="a tool with a name"):
        openai_tools([{"description": "nameless"}])
    with pytest.raises(ConfigurationError, match="a JSON schema"):
        openai_tools([{"name": "a", "inputSchema": [1]}])
    with pytest.raises(ConfigurationError, match=r"several called \['a'\]"):
        openai_tools([{"name": "a"}, {"name": "b"}, {"name": "a"}])
