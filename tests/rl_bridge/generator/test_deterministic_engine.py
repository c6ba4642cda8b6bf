"""A real engine whose answers depend on nothing but the weights, the prompt and the seed."""

import asyncio
from pathlib import Path

import pytest
from generator_fixtures import engine_settings, policy_service, prompts

from rl_bridge.errors import ConfigError
from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

WARM = SamplingSettings(temperature=0.8, max_new_tokens=8)
MANY = prompts(12, length=300)
SEEDS = list(range(len(MANY)))


async def test_answers_do_not_depend_on_the_shapes_of_batches(long_policy: Path, tmp_path: Path) -> None:
    # With two threads even this small model's last bits would depend on them.
    settings = {"max_length": 512, "deterministic": True}
    async with policy_service(long_policy, tmp_path, threads=2, **settings) as (policy, _):
        several = await policy.generate_many.route(MANY, WARM, SEEDS)
        for place in (0, 3, 11):
            assert await policy.generate.route(MANY[place], WARM, SEEDS[place]) == several[place]
        drawn, backwards = await asyncio.gather(
            policy.generate_many.route(MANY[8:], WARM),
            policy.generate_many.route(MANY[1:4][::-1], WARM, SEEDS[1:4][::-1]),
        )
        assert backwards == several[1:4][::-1]
        assert len(drawn) == 4


def test_deterministic_answers_are_not_interrupted(long_policy: Path) -> None:
    with pytest.raises(ConfigError, match='expected weight_update "drain"'):
        engine_settings(long_policy, deterministic=True, weight_update="continue")
