"""Takes one step with a client whose models are the release's own, which refuse any field that they do not know.

typed_client.py URL AMOUNT
"""

import asyncio
import json
import sys
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Observation, State

url, amount = sys.argv[1:]


class Count(Observation):
    total: int
    extra: Any


class CounterClient(EnvClient):
    def _step_payload(self, action):
        return action

    def _parse_result(self, payload):
        seen = Count(**payload["observation"], reward=payload["reward"], done=payload["done"])
        return StepResult(observation=seen, reward=seen.reward, done=seen.done)

    def _parse_state(self, payload):
        return State(**payload)


async def play():
    async with CounterClient(base_url=url) as client:
        await client.reset()
        return (await client.step({"amount": int(amount)})).observation.model_dump()


print(json.dumps(asyncio.run(play())))
