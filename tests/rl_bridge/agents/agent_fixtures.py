"""Agents of the tests, and a worker that plays with one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tool_fixtures import DeskTask
from worker_fixtures import Play, playing

from rl_bridge.agents import AgentRun
from rl_bridge.agents.player import AgentPlayer
from rl_bridge.config import Config
from rl_bridge.rollout import ToolTask


@asynccontextmanager
async def agent_playing(
    server: str,
    folder: Path,
    agent: dict[str, Any],
    script: Callable[[str], str],
    task: type[ToolTask] = DeskTask,
    **options: Any,
) -> AsyncIterator[Play]:
    """A worker of `worker_fixtures` whose episodes an agent plays."""
    rollout = {"task": "a:b", "agent": agent}
    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": rollout})
    agents = AgentPlayer(config, task(config, folder))
    try:
        async with playing([server], task, script, **options) as play:
            play.worker._agents = agents
            yield play
    finally:
        await agents.close()


async def call_in_a_loop(run: AgentRun) -> None:
    """The plainest agent: chat completions and tools until an answer calls none."""
    chat: list[Any] = list(run.messages)
    async with httpx.AsyncClient(
        base_url=run.url, headers={"authorization": f"Bearer {run.key}"}, timeout=60
    ) as http:
        while True:
            body = {"model": "m", "messages": chat, "tools": list(run.functions)}
            reply = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
            message = reply["choices"][0]["message"]
            chat.append(message)
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                result = await run.call(call["function"]["name"], arguments)
                chat.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def call_over_mcp(run: AgentRun) -> None:
    """Calls tools over MCP, once the policy has been asked."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    await call_once(run)
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {run.key}"}, timeout=60) as http,
        Client(streamable_http_client(run.mcp_url, http_client=http)) as client,
    ):
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["add", "echo", "fail", "hang", "finish"]
        added = await client.call_tool("add", {"a": 1, "b": 2})
        assert (added.content[0].text[1:], added.is_error) == ("1 and 2 are 3", False)
        assert (await client.call_tool("fail", {})).is_error
        await client.call_tool("finish", {})


async def call_once(run: AgentRun) -> None:
    headers = {"authorization": f"Bearer {run.key}"}
    async with httpx.AsyncClient(base_url=run.url, headers=headers, timeout=60) as http:
        await http.post("/v1/chat/completions", json={"messages": list(run.messages)})


async def break_down(run: AgentRun) -> None:
    raise ZeroDivisionError("the agent is wrong")


async def never_end(run: AgentRun) -> None:
    await call_once(run)
    await asyncio.sleep(3600)


async def ask_aside(run: AgentRun) -> None:
    """Asks for a title beside its chat, which it then continues."""
    async with httpx.AsyncClient(
        base_url=run.url, headers={"authorization": f"Bearer {run.key}"}, timeout=60
    ) as http:

        async def ask(*messages: Any) -> Any:
            reply = await http.post(
                "/v1/chat/completions", json={"messages": messages, "tools": list(run.functions)}
            )
            return reply.raise_for_status().json()["choices"][0]["message"]

        chat = [*run.messages, await ask(*run.messages)]
        await ask({"role": "user", "content": "a title"})
        chat.append({"role": "user", "content": "go on"})
        chat += [await ask(*chat), {"role": "user", "content": "and on"}]
        await ask(*chat)


async def ask_until_refused(run: AgentRun) -> None:
    """Repeats a call that fails, as SDKs do, until the gateway refuses it."""
    headers = {"authorization": f"Bearer {run.key}"}
    async with httpx.AsyncClient(base_url=run.url, headers=headers, timeout=60) as http:
        status = 0
        while status != 403:
            reply = await http.post("/v1/chat/completions", json={"messages": list(run.messages)})
            status = reply.status_code
