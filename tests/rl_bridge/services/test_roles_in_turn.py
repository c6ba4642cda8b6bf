"""The roles of a run are started in the order in which they need room. Nothing is launched here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge.config import Config

pytestmark = [pytest.mark.heavy, pytest.mark.soak]

# Generators that were started first would spread over all hosts, and leave the trainer none that is free.
CONFIG = {
    "data": {"source": "examples.jsonl"},
    "reward": {"function": "rewards.compute_reward"},
    "rollout": {"max_new_tokens": 4, "max_length": 32},
    "monarch": {
        "num_nodes": 8,
        "gpus_per_node": 8,
        "roles": {"policy": {"replicas": 14, "gpus": 1}, "trainer": {"procs": 8, "gpus": 8}},
    },
}


async def test_the_trainer_takes_its_gpus_before_the_generators(tmp_path: Path) -> None:
    from rl_bridge.loops.roles import start_roles
    from rl_bridge.services.actor import current_launcher
    from rl_bridge.services.options import ServiceOptions

    begun: list[str | None] = []

    class Launcher:
        async def launch(self, actor: type[Any], options: ServiceOptions, args: tuple[Any, ...]) -> Any:
            begun.append(options.name)
            return SimpleNamespace(name=options.name)

    store: Any = None
    before = current_launcher.set(Launcher())
    try:
        roles = await start_roles(Config.model_validate(CONFIG), tmp_path, tmp_path, store)
    finally:
        current_launcher.reset(before)
    assert begun[:2] == ["trainer", "policy"]
    assert (roles.policy.name, roles.trainer.name) == ("policy", "trainer")
