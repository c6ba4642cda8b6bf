"""Turns of an episode, and its siblings' first turns, find their prefixes however many generators there are."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from generator_fixtures import policy_service

from rl_bridge.generator.client import GeneratorClient
from rl_bridge.services.handle import StickySession
from rl_bridge.types import SamplingSettings

pytestmark = pytest.mark.heavy

TURNS, GROUPS, SIBLINGS = 8, 9, 3
BEGIN, HEARD = 70, 34
"""Tokens of a first prompt, and of what is heard between two answers: on a CPU a block of the cache has 32."""
LEAST = 0.6
"""The share of a prompt's tokens that have to be found."""
HOW = SamplingSettings(temperature=1.0, max_new_tokens=6)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, 40, (count,), generator=generator).tolist()
    return tokens


async def episode(
    client: GeneratorClient, session: StickySession | None, prompt: Sequence[int], seed: int
) -> None:
    tokens = list(prompt)
    for turn in range(TURNS):
        answer = await client.complete(tokens, HOW, session=session)
        tokens += [*answer.tokens, *random_tokens(HEARD, 100 * seed + turn)]


async def hit_rate(path: Path, folder: Path, *, replicas: int) -> float:
    """Of a task of eight turns, played by groups of siblings."""
    settings = {"max_length": 512, "max_num_seqs": 16, "kv_cache_mb": 64}
    async with policy_service(path, folder, replicas=replicas, **settings) as (policy, _):
        client = GeneratorClient(policy, max_batch=16)

        async def sibling(group: StickySession | None, prompt: Sequence[int], seed: int) -> None:
            with client.pin_replica(group) as one:
                await episode(client, one, prompt, seed)

        async def group(number: int) -> None:
            prompt = random_tokens(BEGIN, 10_000 + number)
            with client.pin_replica() as one:
                await asyncio.gather(
                    *(sibling(one, prompt, SIBLINGS * number + place) for place in range(SIBLINGS))
                )

        for first in range(0, GROUPS, 3):  # as the dispatcher does, which keeps so many in flight
            await asyncio.gather(*(group(number) for number in range(first, first + 3)))
        statistics = (await policy.statistics.fanout()).values.values()
        await client.close()
        return sum(one.cached_tokens for one in statistics) / sum(one.prompt_tokens for one in statistics)


@pytest.fixture
def roomy_policy(long_policy: Path, tmp_path: Path) -> Path:
    """A checkpoint that takes eight turns: nothing of it depends on how long prompts may be."""
    folder = Path(shutil.copytree(long_policy, tmp_path / "roomy"))
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"max_position_embeddings": 2048}))
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", [None, pytest.param(3, marks=pytest.mark.soak)])
async def test_turns_and_siblings_find_their_prefixes(
    roomy_policy: Path, tmp_path: Path, more: int | None
) -> None:
    alone = await hit_rate(roomy_policy, tmp_path / "one", replicas=1)
    assert alone > LEAST
    if more is not None:  # without sessions near each other: 0.92
        assert await hit_rate(roomy_policy, tmp_path / "more", replicas=more) >= 0.97 * alone
