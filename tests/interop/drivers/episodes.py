"""Plays what it reads from stdin with the GenericEnvClient of the package at hand; prints what came back.

    episodes.py URL async|sync < PLAN

A plan is a list of sessions, opened one after another and held open together; a session is a list of operations:
{"reset": {options}}, {"step": {action}}, {"play": {action}} (the same action until the episode is over), {"state": {}}.
"""

import asyncio
import json
import sys

MOST = 50


def summary(result):
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


def failure(error):
    return {"error": type(error).__name__, "text": str(error)}


async def play(connect, plan):
    outcomes, clients = [], []
    for session in plan:
        outcome = []
        outcomes.append(outcome)
        try:
            client = await connect()
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
        await client.close()
    return outcomes


async def ask(client, name, given):
    try:
        if name == "reset":
            return summary(await client.reset(**given))
        if name == "state":
            return await client.state()
        return summary(await client.step(given))
    except Exception as error:
        return failure(error)


class Awaited:
    """The sync client, so that one function plays both."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)

        async def call(*args, **options):
            return method(*args, **options)

        return call


async def connected(url, face):
    from openenv.core.generic_client import GenericEnvClient

    client = GenericEnvClient(base_url=url)
    if face == "sync":
        client = Awaited(client.sync())
    await client.connect()
    return client


url, face = sys.argv[1:]
print(json.dumps(asyncio.run(play(lambda: connected(url, face), json.load(sys.stdin)))))
