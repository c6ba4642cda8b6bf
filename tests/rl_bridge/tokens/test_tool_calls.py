"""Tool calls in a policy's answer: parsed exactly or refused; repaired only on request."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.tokens.tool_calls import (
    CallStyle,
    ToolCall,
    UnparsableCall,
    parse_tool_calls,
    repair_json,
    style_of_template,
)

HERMES, LLAMA, XML = CallStyle.HERMES, CallStyle.LLAMA, CallStyle.XML


def hermes(block: str) -> str:
    return f"<tool_call>\n{block}\n</tool_call>"


CALL = hermes('{"name": "look", "arguments": {"at": "x"}}')
LLAMA_CALL = '{"name": "look", "parameters": {"at": "x"}}'
LOOK = ToolCall("look", {"at": "x"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 42.", []),
        (CALL, [LOOK]),
        (CALL + hermes('{"arguments": {}, "name": "go"}'), [LOOK, ToolCall("go", {})]),
        # What is thought of is not said.
        ('<think>not <tool_call>{"name"</think>Done.', []),
        ("</think>so: " + CALL, [LOOK]),
        ("<think>and then " + CALL, []),
        # Arguments are as they are written.
        (
            hermes(r'{"name": "f", "arguments": {"a": [1, 2.5, null, true, {"b": "\u00e9\n"}], "": "]}"}}'),
            [ToolCall("f", {"a": [1, 2.5, None, True, {"b": "é\n"}], "": "]}"})],
        ),
        (
            "<think>so</think>" + hermes('{"name": "look", "arguments": {"at": "</think>"}}'),
            [ToolCall("look", {"at": "</think>"})],
        ),
        # Llama's style is another.
        (LLAMA_CALL, []),
    ],
)
def test_calls_as_hermes_writes_them(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text, style=HERMES) == calls


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        (HERMES, "<tool_call>", "expected </tool_call>"),
        (HERMES, "so</tool_call>", "expected <tool_call> before"),
        (HERMES, CALL + "</tool_call>", "expected <tool_call> before"),
        (HERMES, hermes('{"name": "look", "arguments": {}} or so'), "expected JSON"),
        (HERMES, hermes('["look"]'), 'an object with a "name"'),
        (HERMES, hermes('{"name": "look", "arguments": "{}"}'), 'an object as "arguments"'),
        (HERMES, hermes('{"name": "look", "parameters": {}}'), 'an object as "arguments"'),
        (HERMES, hermes('{"name": "look", "arguments": {"at": NaN}}'), "got NaN"),
        (HERMES, hermes('{"name": "look", "arguments": {"at": ' + "9" * 5000 + "}}"), "integer string"),
        (HERMES, hermes("[" * 100_000), ""),
        # What no environment could be sent.
        (HERMES, hermes(r'{"name": "look", "arguments": {"at": "\ud800"}}'), "surrogates not allowed"),
        (HERMES, hermes('{"name": "look", "arguments": {"at": -1e999}}'), "got -inf"),
        (HERMES, hermes('{"name": "f", "arguments": {"": ' + "[" * 80 + "]" * 80 + "}}"), "at most 64 deep"),
        # What was meant nobody knows.
        (HERMES, hermes('{"name": "look", "name": "go", "arguments": {}}'), "got 'name' twice"),
        # One that cannot be read spoils the others.
        (HERMES, CALL + hermes("{"), "expected JSON"),
        (LLAMA, "<|python_tag|>", "expected JSON, got ''"),
        (LLAMA, '{"name": "look", "arguments": {"at": "x"}}', 'an object as "parameters"'),
        (LLAMA, LLAMA_CALL + " and", "expected only ';' and another call after a call"),
        (LLAMA, '{"name": "look", "parameters": {"at": 1, "at": 2}}', "got 'at' twice"),
    ],
)
def test_malformed_calls_are_unparsable(style: CallStyle, text: str, reason: str) -> None:
    found = parse_tool_calls(text, style=style)
    assert isinstance(found, UnparsableCall)
    assert reason in found.reason
    assert found.reason


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 42.", []),
        (LLAMA_CALL, [LOOK]),
        (f'<|python_tag|>{LLAMA_CALL}; {{"name": "go", "parameters": {{}}}}', [LOOK, ToolCall("go", {})]),
        # Text that only speaks of it.
        (f"I would call {LLAMA_CALL}", []),
    ],
)
def test_calls_as_llama_writes_them(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text, style=LLAMA) == calls


@pytest.mark.parametrize(
    "text",
    [
        hermes('{"name": "look", "arguments": {"at": "x'),
        hermes('```json\n{"name": "look", "arguments": {"at": "x",},}\n```'),
        '<tool_call>{"name": "look", "arguments": {"at": "x"}}',
    ],
)
def test_almost_valid_calls_are_repaired_on_request(text: str) -> None:
    assert isinstance(parse_tool_calls(text, style=HERMES), UnparsableCall)
    assert parse_tool_calls(text, style=HERMES, repair=True) == [LOOK]


def xml(name: str, **parameters: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return hermes(f"<function={name}>\n{values}</function>")


XML_CALL = xml("look", at="x")
SCHEMA = {
    "properties": {
        "code": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "names": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "place": {"$ref": "#/$defs/Place"},
        "any": {},
    },
    "$defs": {"Place": {"type": "object"}},
}
FUNCTIONS = [
    {"function": {"name": "go", "parameters": {"properties": {"code": {"type": "integer"}}}}},
    {"function": {"name": "run", "parameters": SCHEMA}},
    {"function": {"name": "wait"}},
]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("code", "a = 1\n\n  if a < 2:\n    print('</b>')\n", "a = 1\n\n  if a < 2:\n    print('</b>')\n"),
        ("code", "12", "12"),
        ("code", '"12"', '"12"'),
        ("code", "", ""),
        ("count", "12", 12),
        ("count", "1.5", 1.5),  # the environment refuses it
        ("share", "12", 12),
        ("deep", "true", True),
        ("deep", "False", False),
        ("names", '["a", {"b": null}]', ["a", {"b": None}]),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "12", "12"),
        ("note", '"so"', '"so"'),
        ("either", "12", 12),
        ("either", "[1]", "[1]"),
        ("place", '{"x": 1}', {"x": 1}),
        ("any", "12", "12"),
        ("unknown", "12", "12"),
    ],
)
def test_schemas_say_what_a_parameter_in_xml_means(key: str, text: str, value: Any) -> None:
    found = parse_tool_calls(f"So: {xml('run', **{key: text})}", style=XML, functions=FUNCTIONS)
    assert found == [ToolCall("run", {key: value})]


def test_calls_in_xml_are_read_in_order() -> None:
    both = xml("wait") + "\n" + xml("go", code="3", to="3")
    calls = [ToolCall("wait", {}), ToolCall("go", {"code": 3, "to": "3"})]
    assert parse_tool_calls(both, style=XML, functions=FUNCTIONS) == calls
    in_a_line = "<tool_call><function=look><parameter=at>x</parameter></function></tool_call>"
    assert parse_tool_calls(in_a_line, style=XML) == [LOOK]
    assert parse_tool_calls("It is 42.", style=XML) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (XML_CALL.removesuffix("</tool_call>"), "expected </tool_call>"),
        (CALL, "expected <function=NAME>"),
        (hermes("<function=look>\n<parameter=at>\nx\n</parameter>"), "expected <function=NAME>"),
        (hermes("<function=look>\n<parameter=at>\nx\n</function>"), "expected <parameter=NAME>"),
        (hermes("<function=look>\nx\n</function>"), "expected <parameter=NAME>"),
        (xml("run", count="many"), "expected JSON of type integer, got 'many'"),
        (xml("run", count="NaN"), "got NaN"),
        (xml("run", place='{"x": 1, "x": 2}'), "got 'x' twice"),
        (hermes(2 * "<function=look></function>"), "expected <parameter=NAME>"),
        (hermes("<function=look>" + 2 * "<parameter=at>x</parameter>" + "</function>"), "got 'at' twice"),
        (xml("look", at="\ud800"), "surrogates not allowed"),
        # In one pass, whatever it is that a policy repeats.
        (hermes("<function=look>" + "<parameter=at>" * 50_000 + "</function>"), "expected <parameter=NAME>"),
        (hermes(("<function=look>" + " " * 99) * 9_000), "expected <function=NAME>"),
    ],
)
def test_malformed_xml_is_unparsable(text: str, reason: str) -> None:
    found = parse_tool_calls(text, style=XML, functions=FUNCTIONS)
    assert isinstance(found, UnparsableCall)
    assert reason in found.reason


@pytest.mark.parametrize(("style", "call"), [(HERMES, CALL), (LLAMA, LLAMA_CALL), (XML, XML_CALL)])
def test_a_thought_that_the_prompt_began_is_no_answer_until_it_ends(style: CallStyle, call: str) -> None:
    assert parse_tool_calls(call, style=style, in_thought=True) == []
    assert parse_tool_calls("", style=style, in_thought=True) == []
    assert parse_tool_calls(f"{call}</think>{call}", style=style, in_thought=True) == [LOOK]


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("{'say': \"it's\", \"x\": 'a \"b\" \\'c\\''}", {"say": "it's", "x": "a \"b\" 'c'"}),
        ('{"a": True, "b": False, "c": None, "d": "True"}', {"a": True, "b": False, "c": None, "d": "True"}),
        ('{"code": "a = 1\n\tb"}', {"code": "a = 1\n\tb"}),
        ('{"a": [1, 2, ], "b": {"c": 1 , }', {"a": [1, 2], "b": {"c": 1}}),
        ('{"a": [1, {"b": "c', {"a": [1, {"b": "c"}]}),
        (' ```json {"a": "```"', {"a": "```"}),
        # A policy that repeats itself is no reason to wait: in one pass, whatever it is that it repeats.
        ('```{"a": 1' + " " * 100_000 + "}", {"a": 1}),
    ],
)
def test_repairs_by_hand(text: str, mended: Any) -> None:
    assert json.loads(repair_json(text)) == mended


@pytest.mark.parametrize("text", ["[1" + ", " * 50_000 + "2", "['" * 20_000])
def test_what_cannot_be_repaired_stays_invalid(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(repair_json(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
few = settings(max_examples=30)


@few
@given(st.text(alphabet="{}[]\",:'\\ \n`aTN0-.", max_size=40))
def test_repair_never_raises(text: str) -> None:
    assert isinstance(repair_json(text), str)
    for style in CallStyle:
        parse_tool_calls(hermes(text), style=style, repair=True)
        parse_tool_calls(text, style=style)


@few
@given(st.text(max_size=30), st.dictionaries(st.text(), JSON, max_size=3))
def test_every_call_that_can_be_written_is_read(prefix: str, arguments: dict[str, Any]) -> None:
    prefix = prefix.replace("<", "").replace("{", "")
    for repair in (False, True):
        text = json.dumps({"name": "f", "arguments": arguments})
        if not any(mark in text for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>")):
            read = parse_tool_calls(prefix + hermes(text), style=HERMES, repair=repair)
            assert read == [ToolCall("f", arguments)]
        text = json.dumps({"name": "f", "parameters": arguments})
        assert parse_tool_calls(text, style=LLAMA, repair=repair) == [ToolCall("f", arguments)]


def test_a_template_says_how_calls_are_written() -> None:
    assert style_of_template("... inside <tool_call></tool_call> tags ...") is HERMES
    assert style_of_template("... <|python_tag|> ...") is LLAMA
    assert style_of_template('<|start_header_id|> {"name": ..., "parameters": ...}') is LLAMA
    # Where a template tells of tools in another way, nobody knows; what is between the marks may be no JSON.
    assert style_of_template("<tool_call>\n<function=name>\n<parameter=name>") is XML
    assert style_of_template("<tool_call>{function-name}\n<arg_key>{name}</arg_key>") is None
    assert style_of_template('[AVAILABLE_TOOLS] {"name": ..., "parameters": ...}') is None
    assert style_of_template("{{ messages }}") is None
