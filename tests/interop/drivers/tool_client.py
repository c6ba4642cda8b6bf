"""Plays with the MCPToolClient of a folder, under the package at hand; prints what came back, by server and face.

    tool_client.py FOLDER URL... < PLAN

A plan is a list of operations: {"reset": {options}}, {"list": null}, {"call": [name, {arguments}]}, {"state": null},
{"has": name}.
"""

import asyncio
import importlib
import inspect
import json
import sys
from pathlib import Path

folder, *urls = sys.argv[1:]
sys.path.insert(0, str(Path(folder).parent))
package = importlib.import_module(Path(folder).name)
Client = getattr(package, package.__all__[0])


async def resolve(value):
    return await value if inspect.isawaitable(value) else value


async def ask(client, name, given):
    try:
        if name == "reset":
            result = await resolve(client.reset(**given))
            return {"done": result.done, "reward": result.reward}
        if name == "list":
            tools = await resolve(client.list_tools())
            return [[tool.name, tool.description, sorted(tool.input_schema["properties"])] for tool in tools]
        if name == "call":
            return await resolve(client.call_tool(given[0], **given[1]))
        if name == "has":
            return await resolve(client.has_tool(given))
        state = await resolve(client.state())
        return {"episode_id": state.episode_id, "step_count": state.step_count}
    except Exception as error:
        return {"error": isinstance(error, RuntimeError), "text": str(error)}


async def play(url, face, plan):
    client = Client(base_url=url)
    if face == "sync":
        client = client.sync()
    await resolve(client.connect())
    outcomes = [await ask(client, *operation) for step in plan for operation in step.items()]
    await resolve(client.close())
    return outcomes


plan = json.load(sys.stdin)
print(json.dumps([{face: asyncio.run(play(url, face, plan)) for face in ("async", "sync")} for url in urls]))
