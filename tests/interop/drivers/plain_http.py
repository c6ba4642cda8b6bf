"""Plays with the client of 0.1, which speaks plain HTTP and expects one sticky instance.

    plain_http.py URL SESSION < PLAN

A plan is a list of operations: "reset", "state", or {the action's fields}. SESSION is the default header's value;
empty: none is sent.
"""

import json
import sys

from openenv_core.client_types import StepResult
from openenv_core.http_env_client import HTTPEnvClient


class Client(HTTPEnvClient):
    def _step_payload(self, action):
        return action

    def _parse_result(self, payload):
        return StepResult(
            observation=payload["observation"], reward=payload.get("reward"), done=bool(payload.get("done"))
        )

    def _parse_state(self, payload):
        return payload


url, session = sys.argv[1:]
client = Client(url, default_headers={"X-OpenEnv-Session": session} if session else None)
outcomes = []
for operation in json.load(sys.stdin):
    try:
        if operation == "state":
            outcomes.append(client.state())
            continue
        result = client.reset() if operation == "reset" else client.step(operation)
        outcomes.append({"observation": result.observation, "reward": result.reward, "done": result.done})
    except Exception as error:
        outcomes.append({"error": type(error).__name__, "text": str(error)})
client.close()
print(json.dumps(outcomes))
