"""Holds many released MCPToolClients open at once, each of which counts in an episode of its own.

    many_tool_clients.py URL SESSIONS CALLS

Says "open" when all are, and goes on when it reads a line. Session number n adds n, as often as it is told; what is
printed last has, for each, the totals that it saw and the steps of its episode.
"""

import asyncio
import json
import sys

from openenv.core.mcp_client import MCPToolClient

url, sessions, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


async def count(client, number):
    totals = [await client.call_tool("add", amount=number) for _ in range(calls)]
    return {"totals": totals, "steps": (await client.state()).step_count}


async def main():
    clients = [MCPToolClient(base_url=url) for _ in range(sessions)]
    for client in clients:
        await client.connect()
        await client.reset()
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    counted = await asyncio.gather(*(count(client, number) for number, client in enumerate(clients, 1)))
    await asyncio.gather(*(client.close() for client in clients))
    print(json.dumps(counted))


asyncio.run(main())
