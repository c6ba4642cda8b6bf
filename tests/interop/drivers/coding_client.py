"""Plays with the typed client of the coding folder, under the released package or under ours; prints what came back.

    coding_client.py URL FOLDER released|ours < PLAN

A plan is a list of operations: {"reset": {options}}, {"code": "..."}, {"state": {}}. It is played by the async client,
then by the sync one: to import a released package takes longer than to play.
"""

import asyncio
import importlib
import inspect
import json
import sys
from pathlib import Path

url, folder, whose = sys.argv[1:]
if whose == "ours":
    from openenv_core import compat

    compat.install()
sys.path.insert(0, str(Path(folder).parent))
coding = importlib.import_module(Path(folder).name)


async def resolve(value):
    return await value if inspect.iscoroutine(value) else value


async def ask(client, name, given):
    try:
        if name == "state":
            state = await resolve(client.state())
            return {
                "kind": type(state).__name__,
                "named": bool(state.episode_id),
                "step_count": state.step_count,
                "last_exit_code": state.last_exit_code,
            }
        action = coding.CodeAction(code=given) if name == "code" else None
        result = await resolve(client.reset(**given) if action is None else client.step(action))
        return {
            "kind": type(result.observation).__name__,
            "observation": result.observation.model_dump(),
            "reward": result.reward,
            "done": result.done,
        }
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


async def play(plan, face):
    client = coding.CodingEnv(base_url=url)
    if face == "sync":
        client = client.sync()
    await resolve(client.connect())
    outcomes = []
    for operation in plan:
        ((name, given),) = operation.items()
        outcomes.append(await ask(client, name, given))
    await resolve(client.close())
    return outcomes


plan = json.load(sys.stdin)
print(json.dumps({face: asyncio.run(play(plan, face)) for face in ("async", "sync")}))
