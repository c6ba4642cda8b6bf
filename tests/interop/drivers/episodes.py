"""Plays what it reads from stdin with the GenericEnvClient of the package at hand; prints what came back.

    episodes.py URL async|sync < PLAN

A plan is a list of sessions, opened one after another and held open together; a session is a list of operations:
{"reset": {options}}, {"step": {action}}, {"play": {action}} (the same action until the episode is over), {"state": {}}.
"""

import asyncio
import inspect
import json
import sys

from openenv.core.generic_client import GenericEnvClient

MOST = 50
url, face = sys.argv[1:]


async def resolve(value):
    return await value if inspect.isawaitable(value) else value


def failure(error):
    return {"error": type(error).__name__, "text": str(error)}


async def play(plan):
    outcomes, clients = [], []
    for session in plan:
        outcome = []
        outcomes.append(outcome)
        client = GenericEnvClient(base_url=url)
        if face == "sync":
            client = client.sync()
        try:
            await resolve(client.connect())
        except Exception as error:
            outcome.append(failure(error))
            continue
        clients.append(client)
        for operation in session:
            ((name, given),) = operation.items()
            for _ in range(MOST if name == "play" else 1):
                got = await ask(client, name, given)
                outcome.append(got)
                if got.get("done") or got.get("error"):
                    break
    for client in clients:
        await resolve(client.close())
    return outcomes


async def ask(client, name, given):
    try:
        if name == "state":
            return await resolve(client.state())
        result = await resolve(client.reset(**given) if name == "reset" else client.step(given))
        return {"observation": result.observation, "reward": result.reward, "done": result.done}
    except Exception as error:
        return failure(error)


print(json.dumps(asyncio.run(play(json.load(sys.stdin)))))
