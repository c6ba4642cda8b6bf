"""The released dialect of tools on /mcp and on sockets; the SDK is imported only when needed."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp_hosts import HANDSHAKE, host, text_of
from serving import ask, eventually, open_session, request, rpc, serving, socket_to
from toolbox import ToolBox, toolbox_app

from openenv_core import Environment, Observation, State
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from servers import create_app

ROOT = Path(__file__).parents[3]


async def test_tools_have_the_released_shape() -> None:
    async with serving(toolbox_app()) as address:
        listed = (await rpc(address, "tools/list"))["result"]["tools"]
        assert listed[0].keys() == {"name", "description", "input_schema"}
        assert listed[0]["input_schema"]["properties"]["by"]["default"] == 1
        handle = await open_session(address)
        for total in (2, 4):
            params = {"name": "bump", "arguments": {"by": 2}, "session_id": handle}
            assert (await rpc(address, "tools/call", params))["result"] == {
                "content": [{"type": "text", "text": str(total)}],
                **{"structured_content": {"result": total}, "meta": None, "data": total, "is_error": False},
            }


async def test_errors_have_the_released_shape() -> None:
    async with serving(toolbox_app()) as address:
        for params, code, kind in (
            ({"name": "fail"}, -32603, "execution_error"),
            ({"name": "nothing"}, -32603, "tool_not_found"),
            ({"name": "bump", "arguments": {"by": "x"}}, -32603, "invalid_args"),
            ({"name": "bump", "arguments": [1]}, -32602, None),
            ({"name": "bump", "session_id": "unknown"}, -32602, None),
            ({}, -32602, None),
        ):
            error = (await rpc(address, "tools/call", params))["error"]
            assert error["code"] == code, params
            assert error["data"] == (None if kind is None else {"error_type": kind}), params


async def test_sockets_call_tools_in_their_own_sessions() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "bump"}}
    async with serving(toolbox_app()) as address:
        async with socket_to(address, path="/mcp") as socket:
            assert [(await ask(socket, call))["result"]["data"] for _ in range(2)] == [1, 2]
        async with socket_to(address) as socket:
            reply = await ask(socket, {"type": "mcp", "data": call})
            assert reply["data"]["result"]["data"] == 1


class Older(Environment[Any, Any, State]):
    """Has tools as step actions, as folders had before tools could be declared."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    calls = 0

    def reset(self) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()

    def step(self, action: ListToolsAction | CallToolAction) -> Observation:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(
                tools=[Tool(name="count", description="", input_schema={"type": "object"})]
            )
        if action.tool_name != "count":
            error = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message="no such tool")
            return CallToolObservation(tool_name=action.tool_name, error=error)
        self.calls += 1
        content = [{"type": "text", "text": str(self.calls)}]
        result = {"content": content, "data": self.calls, "structured_content": {"result": self.calls}}
        return CallToolObservation(tool_name="count", result=result)


async def test_tools_declared_as_step_actions_are_served() -> None:
    app = create_app(Older, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    async with serving(app) as address:
        assert (await rpc(address, "tools/list"))["result"]["tools"][0]["name"] == "count"
        handle = await open_session(address)
        params = {"name": "count", "session_id": handle}
        assert (await rpc(address, "tools/call", params))["result"]["data"] == 1
        assert (await rpc(address, "tools/call", params | {"name": "x"}))["error"]["code"] == -32603
        async with host(address, f"/mcp/{handle}", HANDSHAKE) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["count"]
            result = await client.call_tool("count")
            assert text_of(result) == "2"
            assert result.structured_content == {"result": 2}


async def test_nonstandard_requests_get_the_released_answers() -> None:
    async with serving(toolbox_app()) as address:
        for method in ("GET", "DELETE"):
            assert (await request(address, method, "/mcp")).status_code == 405
        assert (await rpc(address, "resources/list"))["error"]["code"] == -32601
        assert (await request(address, "POST", "/mcp/a/b", "{}")).status_code == 404


SCRIPT = """
import asyncio, json, sys
sys.path[:0] = [{root!r}, {support!r}]
from serving import ask, request, rpc, serving, socket_to
from toolbox import toolbox_app

async def main():
    async with serving(toolbox_app()) as address:
        async with socket_to(address) as socket:
            await ask(socket, {{"type": "reset", "data": {{}}}})
        await rpc(address, "tools/call", {{"name": "bump"}})
        print(json.dumps([name for name in ("mcp", "mcp_types") if name in sys.modules]))
        sys.modules["mcp"] = None
        hello = {{"jsonrpc": "2.0", "id": 5, "method": "initialize", "params": {{}}}}
        for _ in range(2):
            reply = await request(address, "POST", "/mcp", hello)
            print(json.dumps([reply.status_code, reply.json()]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_sdk_is_imported_at_the_first_standard_request_and_named_if_missing() -> None:
    script = SCRIPT.format(root=str(ROOT), support=str(ROOT / "tests" / "support"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded, *replies = map(json.loads, done.stdout.splitlines()[-3:])
    assert loaded == []
    for status, body in replies:
        assert (status, body["id"]) == (501, 5)
        assert "ropewalk[mcp]" in body["error"]["message"]


async def test_disconnect_closes_the_session_opened_for_one_call_and_no_other() -> None:
    app = toolbox_app(cap=1)
    async with serving(app) as address:
        call = asyncio.create_task(rpc(address, "tools/call", {"name": "wait"}))
        await eventually(lambda: app.sessions.active == 1)
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: app.sessions.active == 0)
        handle = await open_session(address)
        wait = {"name": "wait", "arguments": {"seconds": 0.3, "name": "left to itself"}, "session_id": handle}
        call = asyncio.create_task(rpc(address, "tools/call", wait))
        await eventually(lambda: app.sessions.find("", handle).busy)
        call.cancel()
        await asyncio.wait([call])
        bump = await rpc(address, "tools/call", {"name": "bump", "session_id": handle})  # its turn comes next
        assert bump["result"]["data"] == 1
        assert "left to itself" not in ToolBox.cancelled
