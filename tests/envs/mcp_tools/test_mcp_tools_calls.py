"""Names of tools, validation of arguments, and results of calls."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from mcp_types import CallToolResult
from tool_houses import call, entry, house_of, kind, names, playing

from envs.mcp_tools_env.server.episode import fit_name, name_tools, prefix_of
from envs.mcp_tools_env.server.upstream.results import result_of
from envs.mcp_tools_env.server.upstream.schemas import ArgumentChecker
from openenv_core.tools.specs import NAME, openai_tools
from tests.envs.tool_calls import RecordedContext


def test_names_are_what_chat_templates_take_and_depend_on_the_configuration_alone() -> None:
    assert prefix_of("files", None, 1) == ""
    assert prefix_of("files", None, 2) == "files__"
    assert prefix_of("files", "f_", 1) == "f_"
    ours = ("read", "step", "tool_step", "dots.and/slashes", "dots_and_slashes", "x" * 200, "x" * 201)
    tools = [*(("a", "", name) for name in ours), ("b", "", "read"), ("b", "", "ünïcode")]
    found = name_tools(tools)
    assert sorted(found.values()) == sorted((server, name) for server, _, name in tools)
    assert all(NAME.fullmatch(name) for name in found)
    assert found["read"] == ("a", "read")
    assert found["tool_step"] == ("a", "tool_step")
    assert found["dots_and_slashes"] == ("a", "dots_and_slashes")
    assert name_tools(tools) == found
    assert next(iter(found.values())) == ("a", "read")
    assert fit_name("close") == "tool_close"
    assert len(fit_name("y" * 100)) == 64


async def test_tools_of_several_servers_are_one_list_that_chat_templates_take() -> None:
    async with playing(
        house_of({"one": entry(), "two": entry(prefix="second_"), "three": entry(prefix="")})
    ) as env:
        there = await names(env)
        assert {"one__count", "second_count", "count", "tool_reset", "one__reset"} <= set(there)
        assert (await call(env, "tool_reset")).result == "done"
        tools = await env.list_tools()
        assert len(openai_tools(tools)) == len(tools) == len(set(there))


async def test_call_errors_have_a_kind() -> None:
    async with playing(house_of({"one": entry()})) as env:
        wrong: list[dict[str, Any]] = [{}, {"text": 7}]
        for arguments in wrong:  # held against the schema before the call
            seen = await call(env, "echo", **arguments)
            assert kind(seen) == "invalid_args"
            assert "text" in str(seen.error and seen.error.message)
        assert env.state.servers[0].calls == 0
        failed = await call(env, "fail", text="it is broken")
        assert (kind(failed), failed.error and failed.error.message) == ("execution_error", "it is broken")
        observation = await call(env, "fail", text="MCP error -32602: Input validation error")
        assert kind(observation) == "invalid_args"
        assert kind(await call(env, "refuse", code=-32602)) == "invalid_args"
        for code in (-32603, -32000, -32001, -32700):  # the SDK has some of them for a death too
            assert kind(await call(env, "refuse", code=code)) == "execution_error"
        blocks = await call(env, "blocks")
        assert [block["type"] for block in blocks.result] == ["text", "image"]
        assert not any("infrastructure_error" in entry.metadata for entry in env.state.transcript)
        assert env.state.servers[0].restarts == 0


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"content": []}, None),
        ({"content": [{"type": "text", "text": "one"}]}, "one"),
        ({"content": [{"type": "text", "text": "3"}], "structuredContent": {"result": 3}}, 3),
        (
            {"content": [{"type": "text", "text": '{"result": 3}'}], "structuredContent": {"result": 3}},
            {"result": 3},
        ),
        ({"content": [], "structuredContent": {"a": 1, "result": 2}}, {"a": 1, "result": 2}),
    ],
)
def test_a_result_has_one_value(answer: dict[str, Any], value: Any) -> None:
    result = result_of(CallToolResult.model_validate(answer), 1 << 20)
    assert result.value == value
    assert result.metadata == {}


def test_long_results_are_cut_and_uncuttable_ones_named() -> None:
    content = [
        {"type": "text", "text": "ä" * 900},
        {"type": "image", "data": "aGk=" * 500, "mimeType": "image/png"},
        {"type": "text", "text": "end"},
    ]
    answer = CallToolResult.model_validate({"content": content, "structuredContent": {"long": "x" * 5000}})
    result = result_of(answer, 2000)
    assert result.structured is None
    assert [block["type"] for block in result.content] == ["text", "text", "text"]
    assert "image of" in result.content[1]["text"]
    assert result.metadata["cut"]["bytes"] > 8000


def hostile(depth: int) -> dict[str, Any]:
    levels = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(depth)}
    return {"$ref": "#/$defs/l0", "$defs": {**levels, f"l{depth}": {"type": "object"}}}


COUNTRIES = [f"c{number}" for number in range(250)]


@pytest.fixture(scope="module")
def checker() -> Iterator[ArgumentChecker]:
    checker = ArgumentChecker(cpu_s=0.1)
    yield checker
    checker.close()


@pytest.mark.timeout(60)  # without bounds, longer than anybody waits
@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (hostile(60), {}),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 60 + "!"}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"n": n} for n in range(20_000)]}),
        ({"$ref": "file:///etc/passwd"}, {}),
        ({"$ref": "#"}, {}),
        ({"type": 7, "properties": [], "required": {"a": 1}}, {}),
        ({"properties": {"a": {"pattern": "("}}}, {"a": "x"}),
        ({"description": "x" * 300_000, "required": ["a"]}, {}),
        ({"properties": {"a": {"items": {"enum": COUNTRIES}}}}, {"a": ["c249"] * 20_000}),
    ],
)
async def test_hostile_schemas_cost_no_more_than_a_moment(
    checker: ArgumentChecker, schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert await checker.find_faults(schema, arguments) is None
    assert await checker.find_faults({"required": ["a"]}, {}) == ["'a' is a required property"]


async def test_no_reference_is_followed_out_of_a_schema(checker: ArgumentChecker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        elsewhere = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for schema in ({"$ref": elsewhere}, {"$schema": elsewhere}, {"$id": elsewhere, "$ref": "other"}):
            assert not await checker.find_faults(schema, {"a": 1})
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"a": {"pattern": "^[a-z]+$"}}}, {"a": "abc"}, {"a": "A"}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [1, "1", {"x": 1}]}, {"a": [{"x": 1}, {"x": 1}]}),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, {"b": 1}),
        ({"patternProperties": {"^x-": {"type": "string"}}}, {"x-a": "1"}, {"x-a": 1}),
        ({"properties": {"a": {"items": {"enum": COUNTRIES}}}}, {"a": ["c1"] * 100}, {"a": ["c1"] * 100 + ["no"]}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": "x" * 500_000}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"type": "integer"}},
             "properties": {"a": {"$ref": "#/definitions/n"}}},
            {"a": 1},
            {"a": "x"},
        ),
    ],
)  # fmt: skip
async def test_ordinary_schemas_are_held(
    checker: ArgumentChecker, schema: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert await checker.find_faults(schema, right) == []
    assert await checker.find_faults(schema, wrong)


async def test_a_caller_over_mcp_is_told_of_a_changed_list() -> None:
    context = RecordedContext()
    async with playing(house_of({"one": entry()})) as env:
        await env.call_tool("add", {"name": "extra"}, context)
        await env.call_tool("count", {}, context)
        assert "extra" in [spec.name for spec in await env.list_tools()]
    assert context.lists_changed == 1
