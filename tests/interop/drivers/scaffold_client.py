"""Plays with the client class of a folder that the released `init` made, under the released package or under ours.

scaffold_client.py URL FOLDER released|ours
"""

import importlib
import json
import sys
from pathlib import Path

url, folder, whose = sys.argv[1:]
if whose == "ours":
    from openenv_core import compat

    compat.install()
sys.path.insert(0, str(Path(folder).parent))
package = importlib.import_module(Path(folder).name)
client_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Env"))
action_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Action"))


def summary(result):
    return {
        "kind": type(result.observation).__name__,
        "observation": result.observation.model_dump(),
        "reward": result.reward,
        "done": result.done,
    }


with client_class(base_url=url).sync() as client:
    results = [
        client.reset(),
        client.step(action_class(message="hello")),
        client.step(action_class(message="")),
    ]
    outcomes = [summary(result) for result in results]
    state = client.state()
    outcomes.append(
        {"kind": type(state).__name__, "step_count": state.step_count, "named": bool(state.episode_id)}
    )
print(json.dumps(outcomes))
