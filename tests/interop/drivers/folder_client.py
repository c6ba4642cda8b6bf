"""Plays with the client class of a folder, under the released package or under ours; prints what came back, by face.

    folder_client.py URL FOLDER released|ours FACE... < PLAN

A plan is a list of operations: {"reset": {options}}, {"step": {the action's fields}}, {"state": {}}. The async client
plays it, the sync one, or both: to import a released package takes longer than to play.
"""

import asyncio
import importlib
import inspect
import json
import sys
from pathlib import Path

url, folder, whose, *faces = sys.argv[1:]
if whose == "ours":
    from openenv_core import compat

    compat.install()
sys.path.insert(0, str(Path(folder).parent))
package = importlib.import_module(Path(folder).name)
client_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Env"))
action_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Action"))


async def resolve(value):
    return await value if inspect.iscoroutine(value) else value


async def ask(client, name, given):
    try:
        if name == "state":
            state = await resolve(client.state())
            counts = {key: getattr(state, key, None) for key in ("step_count", "last_exit_code")}
            return {"kind": type(state).__name__, "named": bool(state.episode_id), **counts}
        call = client.reset(**given) if name == "reset" else client.step(action_class(**given))
        result = await resolve(call)
        return {
            "kind": type(result.observation).__name__,
            "observation": result.observation.model_dump(),
            "reward": result.reward,
            "done": result.done,
        }
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


async def play(plan, face):
    client = client_class(base_url=url)
    if face == "sync":
        client = client.sync()
    await resolve(client.connect())
    outcomes = [await ask(client, *operation) for step in plan for operation in step.items()]
    await resolve(client.close())
    return outcomes


plan = json.load(sys.stdin)
print(json.dumps({face: asyncio.run(play(plan, face)) for face in faces}))
