"""Tools as chat templates take them."""

import json
from typing import Any

import jinja2
import pytest
from tally import Tally

from openenv_core import ConfigurationError
from openenv_core.tools import Tool, ToolSpec
from openenv_core.tools.openai import openai_tools

TREE = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/Tree"}},
    "required": ["tree"],
    "$defs": {"Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}},
}

# As the templates of models that were taught tools have it, Hermes and Qwen among them.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize(
    "tool",
    [
        Tool(name="plant", description="Plants.", input_schema=TREE),
        ToolSpec(name="plant", description="Plants.", input_schema=TREE, title="Plant", meta={"a": 1}),
        {"name": "plant", "description": "Plants.", "input_schema": TREE},
        {
            "name": "plant",
            "description": "Plants.",
            "inputSchema": TREE,
            "annotations": {"readOnlyHint": True},
        },
        ToolSpec(name="plant", description="Plants.", input_schema=TREE).to_mcp(),
    ],
)
def test_every_form_of_a_tool_becomes_one_function(tool: Any) -> None:
    (told,) = openai_tools([tool])
    assert told == {
        "type": "function",
        "function": {"name": "plant", "description": "Plants.", "parameters": {**TREE}},
    }


@pytest.mark.parametrize("tool", [{"name": "rest"}, {"name": "rest", "description": None, "inputSchema": {}}])
def test_a_tool_that_takes_nothing_takes_an_object(tool: Any) -> None:
    (told,) = openai_tools([tool])
    assert told["function"]["parameters"] == {"type": "object", "properties": {}}
    assert told["function"]["description"] == ""


@pytest.mark.parametrize("name", ["files.read", "a/b", "", "x" * 65, "grüß", "a b", "new\n"])
def test_a_name_that_no_function_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="give the tool another name"):
        openai_tools([{"name": name}])


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a tool with a name"):
        openai_tools([{"description": "nameless"}])
    with pytest.raises(ConfigurationError, match="a JSON schema"):
        openai_tools([{"name": "a", "inputSchema": [1]}])
    with pytest.raises(ConfigurationError, match=r"several called \['a'\]"):
        openai_tools([{"name": "a"}, {"name": "b"}, {"name": "a"}])


def test_a_chat_template_tells_a_model_of_them() -> None:
    tools = openai_tools(Tally().list_tools())
    rendered = (
        jinja2.Environment(autoescape=False)
        .from_string(TEMPLATE)
        .render(tools=tools, messages=[{"role": "user", "content": "Add 2."}])
    )
    lines = rendered.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    # tojson of jinja escapes what HTML would mind; JSON reads it back.
    assert [json.loads(line) for line in lines] == tools
    assert lines[0].startswith('{"')
