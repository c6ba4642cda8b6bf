"""TitanRL's own Rollouter, TokenEnv and Rubric, out of TorchTitan's release, play a served environment."""

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counter import fragile_app
from missing import missing
from serving import serving

# TorchTitan, imported before the bridge has told it that there is no GPU, takes the machine for one with CUDA.
pytestmark = [pytest.mark.heavy, pytest.mark.own_process]


class Letters:
    """A renderer whose tokens are characters."""

    def render_ids(self, *, messages: Any, tools: Any, add_generation_prompt: bool) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def parse_response(self, *, token_ids: list[int]) -> Any:
        return SimpleNamespace(content="".join(map(chr, token_ids)), reasoning_content=None, tool_calls=None)

    def bridge_to_next_turn(self, **_: Any) -> None:
        return None


async def roll_out(address: str, amounts: list[int]) -> tuple[Any, list[str]]:
    """Roll a group out whose siblings answer with these amounts, after an answer that calls nothing."""
    if importlib.util.find_spec("renderers") is None:
        missing("needs renderers; python3.11 scripts/bootstrap.py test-all installs it")
    from torchtitan.config import Configurable
    from torchtitan.experiments.rl.rubrics import RewardFn, Rubric
    from torchtitan.experiments.rl.types import Completion

    from openenv_core.adapters.titan import REWARD

    class Last(RewardFn):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(RewardFn.Config):  # type: ignore[misc]
            pass

        async def __call__(self, rollout: Any, env_input: object) -> float:
            return float(rollout.turns[-1].env_rewards.get(REWARD, math.nan)) if rollout.turns else math.nan

    class Data(Configurable):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Config) -> None: ...

    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (block,) = (block for block in blocks if "BlackjackRollouter" in block)
    shown: dict[str, Any] = {"__name__": __name__}
    exec(block.replace("localhost:8000", address), shown)

    prompts = []

    async def generate(*, prompt_token_ids: list[int], request_id: str, **_: Any) -> Any:
        prompts.append("".join(map(chr, prompt_token_ids)))
        sibling, turn = (int(part.rpartition("=")[2]) for part in request_id.split("/")[1:])
        text = "Hm." if turn == 0 else json.dumps({"name": "act", "arguments": {"amount": amounts[sibling]}})
        ids = [ord(letter) for letter in text]
        return Completion(
            min_policy_version=0, max_policy_version=0, request_id=request_id, finish_reason="stop",
            token_ids=ids, token_logprobs=[0.0] * len(ids),
        )  # fmt: skip

    rollouter = (
        shown["BlackjackRollouter"]
        .Config(
            train_dataset=Data.Config(),
            validation_dataset=Data.Config(),
            rubric=Rubric.Config(reward_fns=[Last.Config()]),
        )
        .build()
    )
    group = await rollouter.run_group_rollouts(
        generate_fn=generate, sample={"prompt": "Count.", "reset": {"start": 3}}, group_id=1,
        group_size=len(amounts), sampling=SimpleNamespace(seed=None), renderer=Letters(),
    )  # fmt: skip
    return group, prompts


async def test_rollout_lost_to_infrastructure_leaves_its_group() -> None:
    async with serving(fragile_app) as address:
        group, prompts = await roll_out(address, [1, 7, 3])
        assert prompts[0].startswith("Count.")
        assert '"total": 3' in prompts[0]
        assert any("there is no call of a tool in the answer" in prompt for prompt in prompts)
        assert [rollout.rollout_id for rollout in group.rollouts] == [0, 2]
        assert [(rollout.reward, rollout.advantage) for rollout in group.rollouts] == [
            (1.0, -1.0),
            (3.0, 1.0),
        ]
        nothing, _ = await roll_out(address, [7, 7])
        assert nothing.rollouts == []
