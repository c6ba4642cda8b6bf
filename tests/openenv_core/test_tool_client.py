"""MCPToolClient against our own servers; for released ones see tests/interop/test_tool_clients.py."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from counter import Add, Count, Counter
from serving import serving
from tally import ENOUGH, Tally

from openenv_core import (
    ClientError,
    ExecutionError,
    MCPToolClient,
    ProtocolError,
    ServerError,
    ToolCallError,
    ValidationFailedError,
)
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.protocol.toolcalls import (
    AnyObservation,
    call_failed,
    read_result,
    read_rpc,
    read_tools,
    value_of,
    value_of_rpc,
)
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsObservation,
    ToolAction,
    ToolErrorType,
    ToolObservation,
)
from servers import create_app

NAMES = ["add", "greet", "profile", "fail", "wait"]


def tally_app(**options: Any) -> Any:
    return create_app(Tally, ToolAction, ToolObservation, max_concurrent_envs=8, **options)


@pytest.fixture
async def client() -> AsyncIterator[MCPToolClient]:
    async with serving(tally_app()) as address, MCPToolClient(f"http://{address}") as client:
        yield client


@pytest.mark.parametrize("mode", ["simulation", "production"])
async def test_tools_are_listed_and_called(mode: str) -> None:
    async with serving(tally_app(mode=mode)) as address, MCPToolClient(f"http://{address}", mode=mode) as env:
        assert [tool.name for tool in await env.list_tools()] == NAMES
        assert await env.call_tool("add", amount=2) == 2
        assert await env.call_tool(name="add", amount=3) == 5
        assert await env.call_tool("greet", name="Ada") == "Hello, Ada!"
        assert await env.call_tool("profile", who="x") == {"who": "x", "data": [1, 2]}
        for name, arguments, kind in (
            ("add", {"amount": "many"}, ToolErrorType.INVALID_ARGS),
            ("add", {"amount": 1, "more": 1}, ToolErrorType.INVALID_ARGS),
            ("nope", {}, ToolErrorType.TOOL_NOT_FOUND),
            ("fail", {"why": "because"}, ToolErrorType.EXECUTION_ERROR),
            ("wait", {"seconds": 60.0}, ToolErrorType.TIMEOUT),
        ):
            with pytest.raises(ToolCallError) as failed:
                await env.call_tool(name, **arguments)
            assert (failed.value.tool_name, failed.value.error_type) == (name, kind)
        assert await env.call_tool("add", amount=1) == 6


def steps_of(client: MCPToolClient, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that the client's steps will be in."""
    steps: list[Any] = []
    step = client.step

    async def recorded_step(action: Any) -> Any:
        steps.append(action)
        return await step(action)

    monkeypatch.setattr(client, "step", recorded_step)
    return steps


async def test_production_mode_is_detected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tally_app(mode="production")) as address, MCPToolClient(f"http://{address}") as env:
        steps = steps_of(env, monkeypatch)
        assert await env.call_tool("add", amount=2) == 2  # and nothing is counted twice
        assert await env.call_tool("add", amount=2) == 4
        assert await env.has_tool("add")
        assert len(steps) == 1


@pytest.mark.parametrize(
    "refusal", [ValidationFailedError("mcp?", "UNKNOWN_TYPE"), JsonRpcFaultError(-32601, "what?")]
)
async def test_server_that_lists_tools_by_steps_only(
    refusal: Exception, client: MCPToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> Any:
        raise refusal

    monkeypatch.setattr(client, "_call_rpc", refused)
    assert [tool.name for tool in await client.list_tools()] == NAMES


async def test_tool_call_is_a_step_of_the_episode(client: MCPToolClient) -> None:
    first = await client.reset(seed=7, episode_id="mine")
    assert isinstance(first.observation, AnyObservation)
    assert first.metadata == {"status": "ready"}
    assert await client.call_tool("add", amount=1) == 8
    await client.list_tools()
    result = await client.step(CallToolAction(tool_name="add", arguments={"amount": 1}))
    assert isinstance(result.observation, CallToolObservation)
    assert (result.observation.result, result.reward, result.done) == (9, 0.5, False)
    listed = await client.step({"type": "list_tools"})
    assert isinstance(listed.observation, ListToolsObservation)
    state = await client.state()
    assert (state.episode_id, state.step_count) == ("mine", 2)
    with pytest.raises(ToolCallError, match=r"tool 'fail' failed \(execution_error\): because") as failed:
        await client.call_tool("fail", why="because")
    assert isinstance(failed.value, RuntimeError)  # what callers of the released client catch
    assert isinstance(failed.value, ClientError)
    assert failed.value.step_result.reward == -1.0
    await client.call_tool("add", amount=ENOUGH)
    with pytest.raises(ExecutionError, match=r"call reset\(\)"):
        await client.call_tool("add", amount=1)
    await client.reset()
    assert await client.call_tool("add", amount=1) == 1


async def test_server_without_tools_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(create_app(Counter, Add, Count, max_concurrent_envs=2)) as address:
        for mode in ("simulation", "production"):
            async with MCPToolClient(f"http://{address}", mode=mode) as env:
                steps = steps_of(env, monkeypatch)
                with pytest.raises(ServerError, match="tools"):
                    await env.list_tools()
                with pytest.raises(ToolCallError, match="tools"):
                    await env.call_tool("add", amount=1)
                assert mode == "simulation" or not steps
                assert (await env.step({"amount": 3})).observation.total == 3  # type: ignore[attr-defined]


async def test_tools_are_described_and_their_list_is_cached_per_episode(
    client: MCPToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods: list[str] = []
    ask = client._call_rpc

    async def counted_call(method: str, params: Any) -> Any:
        methods.append(method)
        return await ask(method, params)

    monkeypatch.setattr(client, "_call_rpc", counted_call)
    (await client.list_tools()).clear()  # the caller's own list
    tool = await client.get_tool("add")
    assert (tool.name, tool.description) == ("add", "Add to the total, and return it.")
    assert await client.get_tool("nope") is None
    assert await client.has_tool("add")
    assert not await client.has_tool("reset")
    described = await client.openai_tools()
    assert [one["function"]["name"] for one in described] == NAMES
    assert described[0]["function"]["parameters"]["required"] == ["amount"]
    assert len(methods) == 1
    await client.list_tools(use_cache=False)
    await client.reset()
    await client.list_tools()
    assert len(methods) == 3
    with pytest.raises(TypeError, match="expected the name of a tool"):
        await client.call_tool(amount=1)


async def test_tools_work_over_plain_http() -> None:
    async with serving(tally_app()) as address, MCPToolClient(f"http://{address}", transport="http") as env:
        assert [tool.name for tool in await env.list_tools()] == NAMES  # before there is a session
        await env.reset(seed=1)
        assert await env.call_tool("add", amount=1) == 2
        assert [tool.name for tool in await env.list_tools()] == NAMES
        env._refuses_steps = True
        assert await env.call_tool("add", amount=1) == 3
        assert (await env.state()).step_count == 2


RELEASED = {
    "content": [{"type": "text", "text": "5", "annotations": None, "meta": None}],
    "structured_content": {"result": 5},
    "meta": None,
    "data": 5,
    "is_error": False,
}


def test_values_are_unwrapped_from_released_results() -> None:
    for result, value in (
        (RELEASED, 5),
        ({**RELEASED, "data": None}, 5),
        ({**RELEASED, "data": None, "structured_content": {"a": 1}}, {"a": 1}),
        ({**RELEASED, "data": None, "structured_content": None}, "5"),
        ({**RELEASED, "data": None, "structured_content": {"result": None}, "content": []}, None),
        ({"content": [{"type": "image"}], "isError": False}, [{"type": "image"}]),
        ({"content": [], "isError": False}, None),
        # Values of our own tools that look a little like it are what they are.
        ({"data": 3, "content": "x"}, {"data": 3, "content": "x"}),
        ({"data": 3}, {"data": 3}),
        ({"data": 3, "content": [], "is_error": "no"}, {"data": 3, "content": [], "is_error": "no"}),
        ([1], [1]),
        (None, None),
    ):
        assert value_of_rpc("t", result) == value
        step = read_result({"observation": {"tool_name": "t", "result": result}})
        assert value_of("t", step) == value


def test_error_results_raise_tool_call_error() -> None:
    for result, expected in (
        ({"content": [{"type": "text", "text": "no"}], "is_error": True}, r"execution_error\): no"),
        ({"content": [], "isError": True}, "gave no reason"),
        ({"content": [{"type": "text"}], "is_error": True}, "execution_error"),
        ({"tool_name": "t", "error": {"error_type": "timeout", "message": "late"}}, r"timeout\): late"),
        ({"tool_name": "t", "error": {"error_type": []}}, "execution_error"),
    ):
        with pytest.raises(ToolCallError, match=expected):
            value_of_rpc("t", result)


def test_unknown_errors_and_fields_are_accepted() -> None:
    fields = {"tool_name": "t", "error": {"error_type": "brand_new", "message": "m"}, "more": 1}
    step = read_result({"observation": fields, "reward": 1, "done": True, "metadata": {"a": 1}})
    assert isinstance(step.observation, CallToolObservation)
    assert step.observation.error.error_type == ToolErrorType.EXECUTION_ERROR
    assert (step.reward, step.done, step.metadata, step.observation.done) == (1, True, {"a": 1}, True)
    assert step.observation.more == 1  # type: ignore[attr-defined]
    listed = read_result({"observation": {"tools": [{"name": "a", "inputSchema": {"x": 1}, "title": "A"}]}})
    assert isinstance(listed.observation, ListToolsObservation)
    assert listed.observation.tools[0].input_schema == {"x": 1}
    other = read_result({"observation": {"tools": ["hammer"], "text": "a shed"}})
    assert isinstance(other.observation, AnyObservation)
    # The call that ends an episode may be answered with an observation of the environment's own.
    assert value_of("t", other) is other.observation
    odd = read_result({"observation": {}, "reward": "1.5", "done": "yes", "metadata": [1]})
    assert (odd.reward, odd.done, odd.metadata) == (1.5, True, None)


def test_invalid_lists_and_responses_are_refused() -> None:
    for listed in (None, {}, {"tools": {}}, {"tools": [{}]}, {"tools": [{"name": "a", "input_schema": 3}]}):
        with pytest.raises(ProtocolError):
            read_tools(listed)
    assert read_rpc({"id": 3, "result": None}, 3) is None
    for response in ({"id": 2, "result": 1}, {"id": 3}, {"id": 3, "error": None}):
        with pytest.raises(ProtocolError):
            read_rpc(response, 3)
    odd = "execution_error"
    for data, kind in (({"error_type": "timeout"}, "timeout"), ("odd", odd), ({"error_type": 3}, odd)):
        with pytest.raises(JsonRpcFaultError) as failed:
            read_rpc({"id": 3, "error": {"code": -32603, "message": "m", "data": data}}, 3)
        assert call_failed("t", failed.value).error_type == kind
    for payload in ({}, {"observation": None}, {"observation": {"tool_name": 3}}):
        with pytest.raises(ProtocolError):
            read_result(payload)
