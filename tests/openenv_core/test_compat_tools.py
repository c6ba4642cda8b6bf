"""Environments around an MCP server object, as they are written for the released package.

The object is the official SDK's here. With FastMCP's: tests/interop/test_tool_clients.py.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from mcp.server import mcpserver
from serve_process import eventually
from serving import ask, rpc, serving, socket_to

from openenv_core import (
    Action,
    ClientClosedError,
    ConfigurationError,
    EpisodeOverError,
    MCPToolClient,
    Observation,
    State,
    ToolCallError,
)
from openenv_core.compat.types import (
    JsonRpcError,
    JsonRpcErrorCode,
    JsonRpcRequest,
    JsonRpcResponse,
    McpMethod,
    WSMCPMessage,
    WSMCPResponse,
)
from openenv_core.protocol.frames import encode_observation
from openenv_core.tools import (
    SILENT,
    CallToolAction,
    CallToolObservation,
    InvalidArgumentsError,
    ListToolsAction,
    NoSuchPromptError,
    NoSuchResourceError,
    ToolContext,
    ToolResult,
    is_tool_host,
)
from openenv_core.tools.mcp_environment import MCPEnvironment, get_server_tools
from openenv_core.tools.mcp_object import McpObjectSession
from servers import create_app

WAIT_TIMEOUT_S = 60


class Reset(Action):
    by: int


class Abacus(MCPEnvironment):
    """Counts, as released environments do it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = mcpserver.MCPServer("abacus", log_level="CRITICAL")
        self.gate = threading.Event()

        @server.tool()  # type: ignore[untyped-decorator]
        def add(amount: int) -> int:
            """Adds."""
            self.total += amount
            return self.total

        @server.tool()  # type: ignore[untyped-decorator]
        async def fail(why: str) -> str:
            raise mcpserver.exceptions.ToolError(why)

        @server.tool()  # type: ignore[untyped-decorator]
        def hang() -> str:
            self.gate.wait(WAIT_TIMEOUT_S)
            return "late"

        @server.tool()  # type: ignore[untyped-decorator]
        async def told(ctx: mcpserver.Context) -> None:
            await ctx.report_progress(1, 2, "half")

        @server.resource("abacus://beads")  # type: ignore[untyped-decorator]
        def beads() -> str:
            return f"{self.total} beads"

        @server.prompt()  # type: ignore[untyped-decorator]
        def begin(goal: str) -> str:
            return f"Count to {goal}."

        super().__init__(server)
        self.total = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self.total = seed or 0
        self._state = State(episode_id=episode_id)
        return Observation(reward=0.0)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        assert isinstance(action, Reset)
        self.total -= action.by
        return Observation(metadata={"total": self.total})

    @property
    def state(self) -> State:
        return self._state


class Both(Abacus):
    """Overrides both steps, as the newer ones do."""

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **options)

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        self._state.step_count += 1
        if isinstance(action, CallToolAction) and action.tool_name == "end":
            raise EpisodeOverError
        return await super().step_async(action, timeout_s=timeout_s, **options)


class PlainOnly(Abacus):
    """Overrides the plain one alone, and answers the call that ends the episode with another observation."""

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        self._state.step_count += 1
        observation = super().step(action, timeout_s=timeout_s, **options)
        if self.total >= 10:
            return Observation(done=True, reward=1.0, metadata={"total": self.total})
        return observation


@pytest.fixture
def abacus() -> Iterator[Abacus]:
    env = Abacus()
    yield env
    env.gate.set()
    env.close()


def call(tool: str, **arguments: Any) -> CallToolAction:
    return CallToolAction(tool_name=tool, arguments=arguments)


def stepped(env: MCPEnvironment, action: Action, **options: Any) -> CallToolObservation:
    observation = env.step(action, **options)
    assert isinstance(observation, CallToolObservation)
    return observation


def test_steps_list_and_call_and_failures_are_typed(abacus: Abacus) -> None:
    tools = abacus.step(ListToolsAction()).tools  # type: ignore[attr-defined]
    assert [tool.name for tool in tools] == ["add", "fail", "hang", "told"]
    assert (tools[0].description, tools[0].input_schema["required"]) == ("Adds.", ["amount"])
    observation = stepped(abacus, call("add", amount=2))
    # Attributes, as authors use them, and the JSON that released clients read.
    assert (observation.result.data, observation.result.content[0].text) == (2, "2")
    sent = json.loads(encode_observation(observation))["data"]["observation"]["result"]
    assert sent["content"][0]["text"] == "2"
    assert (sent["structured_content"], sent["data"], sent["is_error"]) == ({"result": 2}, 2, False)
    assert abacus.step(Reset(by=1)).metadata == {"total": 1}
    for action, kind, text in (
        (call("fail", why="because"), "execution_error", "because"),
        (call("add", amount="many"), "invalid_args", "valid integer"),
        (call("add"), "invalid_args", "Field required"),
        (call("nope"), "tool_not_found", "nope"),
    ):
        error = stepped(abacus, action).error
        assert (error.error_type, text in error.message) == (kind, True)


def test_fastmcp_is_asked_for_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools keep `ctx.set_state` for the session, which is a single request in the stateless version of MCP."""

    class Client:
        def __init__(self, server: Any, mode: str = "auto") -> None:
            self.mode = mode

        def call_tool(self) -> None: ...

        def call_tool_mcp(self) -> None: ...

    package = ModuleType("fastmcp_like")
    package.Client = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastmcp_like", package)
    server = type("FastMCP", (), {"__module__": "fastmcp_like.server"})()
    assert McpObjectSession(server).new_client().mode == "legacy"


async def test_hanging_tool_blocks_no_other(abacus: Abacus) -> None:
    other = Abacus()
    late = await abacus.step_async(call("hang"), timeout_s=0.05)
    assert late.error.error_type == "timeout"  # type: ignore[attr-defined]
    assert (await other.step_async(call("add", amount=1))).result.data == 1  # type: ignore[attr-defined]
    assert (await abacus.step_async(call("add", amount=1))).result.data == 1  # type: ignore[attr-defined]
    late = await asyncio.to_thread(abacus.step, call("hang"), timeout_s=0.05)
    assert late.error.error_type == "timeout"  # type: ignore[attr-defined]
    other.close()


async def test_abandoned_steps_run_one_after_the_other_and_raise_nowhere(
    abacus: Abacus, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []
    has_begun = threading.Event()
    threads: set[int] = set()
    before = set(threading.enumerate())  # among them may be threads of earlier tests that are about to end

    def step(action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        begun.append(action.by)  # type: ignore[attr-defined]
        has_begun.set()
        own = set(threading.enumerate()) - before
        threads.add(sum(thread.name == "openenv-step" for thread in own))
        abacus.gate.wait(WAIT_TIMEOUT_S)
        if action.by == 0:  # type: ignore[attr-defined]
            raise EpisodeOverError
        return Observation(reward=action.by)  # type: ignore[attr-defined]

    abacus._step_impl = step  # type: ignore[method-assign]
    first = asyncio.create_task(abacus.step_async(Reset(by=0)))
    assert await asyncio.to_thread(has_begun.wait, WAIT_TIMEOUT_S)
    first.cancel()
    for number in range(1, 5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abacus.step_async(Reset(by=number)), 0.02)
    waiting = asyncio.create_task(abacus.step_async(Reset(by=7)))
    await asyncio.sleep(0)
    abacus.gate.set()
    assert (await waiting).reward == 7
    # Those that had not begun were cancelled; the first one ended although nobody waited for it.
    assert begun == [0, 7]
    assert max(threads) <= 2  # the thread of the call before may be about to end
    assert not caplog.records


# The exit ends the thread of the session with the server object, and another one takes its place.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("how", "mode", "why"),
    [
        ("exit", "auto", "SystemExit: 3"),
        ("itself", "auto", "cancelled itself"),
        ("exit", "legacy", "cancelled itself"),
        ("itself", "legacy", "cancelled itself"),
    ],
)
async def test_tool_that_exits_ends_no_other(abacus: Abacus, how: str, mode: str, why: str) -> None:
    abacus._session._client = partial(abacus._session._client, mode=mode)

    @abacus.tool()
    async def leave(how: str) -> None:
        if how == "exit":
            raise SystemExit(3)
        task = asyncio.current_task()
        task.cancel()

    abacus.reset()
    left, add = call("leave", how=how), call("add", amount=1)
    for asynchronous in (False, True):
        answer = await abacus.step_async(left) if asynchronous else abacus.step(left)
        assert isinstance(answer, CallToolObservation)
        assert (answer.error.error_type, why in answer.error.message) == ("execution_error", True)
        abacus.step(add)
    assert abacus.total == 2


def test_closed_environment_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())

    def new_threads() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    env = Abacus()
    assert not new_threads()  # the session begins with the first call
    stepped(env, call("add", amount=1))
    assert new_threads()
    env.close()
    env.close()
    eventually(lambda: not new_threads())  # threads that tools ran in end with their event loop
    assert (env.mcp_server, env.mcp_client) == (None, None)
    with pytest.raises(ClientClosedError, match="close"):
        env.step(call("add", amount=1))


async def test_session_of_the_author_works(abacus: Abacus) -> None:
    async with abacus.mcp_session() as client:
        assert (await client.call_tool("add", {"amount": 2})).structured_content == {"result": 2}
    abacus.close()
    with pytest.raises(RuntimeError, match="close"):
        async with abacus.mcp_session():
            pass


async def test_environment_hosts_tools_resources_and_prompts(abacus: Abacus) -> None:
    assert is_tool_host(Abacus)
    assert [spec.name for spec in await abacus.list_tools()] == ["add", "fail", "hang", "told"]
    result = abacus.call_tool("add", {"amount": 3}, SILENT)
    assert not isinstance(result, ToolResult)
    result = await result
    assert (result.value, result.structured, result.content) == (
        3,
        {"result": 3},
        [{"type": "text", "text": "3"}],
    )
    failed = await abacus.call_tool("nope", {}, SILENT)  # type: ignore[misc]
    assert failed.error is not None
    assert failed.is_error
    assert [one.uri for one in await abacus.list_resources()] == ["abacus://beads"]
    assert await abacus.list_resource_templates() == []
    assert (await abacus.read_resource("abacus://beads", SILENT))[0]["text"] == "3 beads"
    with pytest.raises(NoSuchResourceError):
        await abacus.read_resource("abacus://none", SILENT)
    assert [one.arguments[0].name for one in await abacus.list_prompts()] == ["goal"]
    prompt = await abacus.get_prompt("begin", {"goal": "3"}, SILENT)
    assert prompt.messages == [{"role": "user", "content": {"type": "text", "text": "Count to 3."}}]
    with pytest.raises(NoSuchPromptError, match="begin"):
        await abacus.get_prompt("nope", {}, SILENT)
    with pytest.raises(InvalidArgumentsError):
        await abacus.get_prompt("begin", {}, SILENT)
    assert (await abacus.complete({}, {}, SILENT)).values == []
    events: list[Any] = []

    class Ear(ToolContext):
        def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
            events.append((progress, total, message))

    await abacus.call_tool("told", {}, Ear())  # type: ignore[misc]
    await abacus.step_async(call("told"))
    assert events == [(1, 2, "half")]


@pytest.mark.parametrize("kind", [Both, PlainOnly])
async def test_step_overrides_apply_over_every_route(kind: type[Abacus]) -> None:
    app = create_app(kind, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    async with serving(app) as address, MCPToolClient(f"http://{address}") as env:
        await env.reset()
        assert await env.call_tool("add", amount=2) == 2
        assert (await env.state()).step_count == 1
        env._refuses_steps = True
        assert await env.call_tool("add", amount=2) == 4
        with pytest.raises(ToolCallError, match="nope"):
            await env.call_tool("nope")
        assert (await env.state()).step_count == 3
        # What released clients of the newest release do.
        created = await rpc(address, "openenv/session/create")
        session_id = created["result"]["session_id"]
        params = {"session_id": session_id, "name": "add", "arguments": {"amount": 5}}
        result = (await rpc(address, "tools/call", params))["result"]
        assert (result["data"], result["structured_content"], result["is_error"]) == (5, {"result": 5}, False)
        async with socket_to(address, f"?session_id={session_id}") as socket:
            assert (await ask(socket, {"type": "state"}))["data"]["step_count"] == 1
            # Released folders name the action of calls, and mean that of lists as well.
            listed = await ask(socket, {"type": "step", "data": {"type": "list_tools"}})
            assert [tool["name"] for tool in listed["data"]["observation"]["tools"]][:1] == ["add"]


async def test_step_may_return_another_observation_for_a_call() -> None:
    env = PlainOnly()
    result = env.call_tool("add", {"amount": 10}, SILENT)
    assert isinstance(result, ToolResult)  # in the caller's thread: servers call it in one of theirs
    assert (result.value, result.reward, result.done) == ({"total": 10}, 1.0, True)
    env.close()
    over = Both()
    with pytest.raises(EpisodeOverError):
        await over.call_tool("end", {}, ToolContext())  # type: ignore[misc]
    assert over._context is SILENT  # a later call's progress is not that call's
    over.close()


def test_tools_can_be_limited_to_one_mode(abacus: Abacus) -> None:
    @abacus.tool(mode="production")
    def where(far: int, how: str = "on foot") -> str:
        """Tells where."""
        return f"out there, {far} {how}"

    @abacus.tool(mode="simulation")
    async def whither() -> str:
        return "nowhere"

    @abacus.tool()
    def everywhere() -> str:
        return "everywhere"

    assert stepped(abacus, call("everywhere")).result.data == "everywhere"
    error = stepped(abacus, call("where", far=1)).error
    assert error.error_type == "tool_not_found"
    abacus._mode = "production"
    listed = abacus.step(ListToolsAction()).tools  # type: ignore[attr-defined]
    assert [tool.name for tool in listed] == ["add", "fail", "hang", "told", "everywhere", "where"]
    assert listed[-1].description == "Tells where."
    assert listed[-1].input_schema["required"] == ["far"]
    assert stepped(abacus, call("where", far=1)).result.data == "out there, 1 on foot"
    assert list(abacus.get_callables()) == ["where"]  # the SDK's listing does not tell its functions
    abacus._mode = "simulation"
    assert stepped(abacus, call("whither")).result.data == "nowhere"
    with pytest.raises(ConfigurationError, match="mode"):
        abacus.tool(mode="dreaming")

    def reset() -> None: ...

    with pytest.raises(ConfigurationError, match="another name"):
        abacus.tool()(reset)


class Around(Abacus):
    def __init__(self, server: Any) -> None:
        MCPEnvironment.__init__(self, server)


def test_object_that_is_not_an_mcp_server_and_code_in_the_server_are_refused(abacus: Abacus) -> None:
    assert not abacus.supports_code_mode
    with pytest.raises(ConfigurationError, match="code_interpreter_env"):
        abacus.execute_code("result = 1")
    with pytest.raises(ConfigurationError, match="expected an MCP server object"):
        Around(object())
    server = mcpserver.MCPServer("odd")
    server.tool(name="close")(lambda: None)
    with pytest.raises(ConfigurationError, match="close"):
        Around(server)
    assert list(get_server_tools(server)) == ["close"]
    assert get_server_tools(object()) == {}


async def test_failed_start_of_the_server_object_is_an_infrastructure_failure() -> None:
    @asynccontextmanager
    async def broken(_: Any) -> Any:
        raise OSError("no beads")
        yield

    server = mcpserver.MCPServer("broken", lifespan=broken, log_level="CRITICAL")
    server.tool(name="add")(lambda: None)
    env = Around(server)
    observation = await env.step_async(call("add"))
    assert observation.error.error_type == "transport_error"  # type: ignore[attr-defined]
    assert "no beads" in observation.metadata["infrastructure_error"]
    observation = stepped(env, call("add"))
    assert "no beads" in observation.metadata["infrastructure_error"]
    env.close()


def test_json_rpc_models_match_the_released_ones() -> None:
    request = JsonRpcRequest.model_validate({"jsonrpc": "2.0", "method": McpMethod.TOOLS_CALL, "id": "a"})
    assert (request.method, request.params) == ("tools/call", {})
    assert JsonRpcResponse.success({"a": 1}, 3).model_dump() == {
        "jsonrpc": "2.0",
        "id": 3,
        "result": {"a": 1},
    }
    failed = JsonRpcResponse.error_response(JsonRpcErrorCode.INVALID_PARAMS, data=[1], request_id=3)
    error = {"code": -32602, "message": "Invalid params", "data": [1]}
    assert failed.model_dump() == {"jsonrpc": "2.0", "id": 3, "error": error}
    assert JsonRpcError.from_code(JsonRpcErrorCode.PARSE_ERROR, "m").code == -32700
    assert WSMCPMessage(data={"a": 1}).model_dump() == WSMCPResponse(data={"a": 1}).model_dump()
