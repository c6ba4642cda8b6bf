"""Plays with many clients of the package at hand, which come at once; prints how each ended.

crowd.py URL CLIENTS HOLD_S
"""

import asyncio
import inspect
import json
import sys
import time

from openenv.core.generic_client import GenericEnvClient

url, clients, hold_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


async def resolve(value):
    return await value if inspect.isawaitable(value) else value


async def play():
    began = time.monotonic()
    client = GenericEnvClient(base_url=url)
    try:
        await resolve(client.connect())
        opened_s = time.monotonic() - began
        await resolve(client.reset(seed=1))
        await asyncio.sleep(hold_s)
        total = (await resolve(client.step({"amount": 1}))).observation["total"]
        return {"total": total, "after_s": opened_s}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "after_s": time.monotonic() - began}
    finally:
        await resolve(client.close())


async def main():
    return await asyncio.gather(*(play() for _ in range(clients)))


print(json.dumps(asyncio.run(main())))
