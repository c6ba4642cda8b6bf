"""A task of the database, solved by an MCP host that knows no reset and no step."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import TextResourceContents
from sqlite_solver import solve

from openenv_core.tools import CallToolObservation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


async def test_an_mcp_host_solves_a_task(tmp_path: Path) -> None:
    command = ["-m", "openenv_core.cli", "mcp", "sqlite", "--seed", "7", "--option", "split=test"]
    parameters = StdioServerParameters(command=sys.executable, args=command, cwd=ROOT)
    results: list[Any] = []
    with (tmp_path / "log").open("w") as log:
        async with Client(stdio_client(parameters, errlog=log), mode="auto") as client:
            (found,) = (await client.read_resource("task://current")).contents
            assert isinstance(found, TextResourceContents)
            (message,) = (await client.get_prompt("task")).messages
            assert getattr(message.content, "text", None) == found.text
            loop = asyncio.get_running_loop()

            def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
                calling = client.call_tool(name, arguments)
                result = asyncio.run_coroutine_threadsafe(calling, loop).result(timeout=60)
                assert not result.is_error, result.content
                value: Any = result.structured_content
                results.append(value["result"] if set(value) == {"result"} else value)
                return CallToolObservation(tool_name=name, result=results[-1])

            await asyncio.to_thread(solve, found.text, call)
            assert (await client.call_tool("list_tables", {})).is_error  # it is over
    assert results[-1] == "right"
