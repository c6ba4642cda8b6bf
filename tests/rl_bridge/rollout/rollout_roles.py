"""A policy without a model, for rollout workers in processes of their own. Its process imports it by this name."""

import asyncio
from collections.abc import Mapping, Sequence

from monarch.actor import concurrent_endpoint

from rl_bridge.buffer.stored import TokenStore
from rl_bridge.services.actor import ServiceActor
from rl_bridge.tokens.arrays import TokenKey, TrajectoryTokens
from rl_bridge.types import Completion, SamplingSettings


class SlowPolicy(ServiceActor):
    """Answers with a token that the seed decides, after a while, and says which weights it holds."""

    REPLAYED = ("update_weights",)
    REPEATABLE = frozenset({"generate_many"})

    def __init__(self, held: frozenset[int]) -> None:
        self._version = 0
        self._held = held
        self._holding = 0

    @concurrent_endpoint
    async def update_weights(self, version: int) -> None:
        self._version = version

    @concurrent_endpoint
    async def holding(self) -> int:
        """How many questions have come whose seeds are held."""
        return self._holding

    @concurrent_endpoint
    async def release(self) -> None:
        """Answer them, and hold none any more."""
        self._held = frozenset()

    @concurrent_endpoint
    async def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int] | None = None,
        ids: Sequence[str] = (),
    ) -> list[Completion]:
        version = self._version
        if self._held.intersection(seeds or ()):
            self._holding += 1
            while self._held:  # noqa: ASYNC110 - release is another call
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        return [
            Completion(tokens=[3 + seed % 8], logprobs=[-0.5], versions=[version], stopped=True)
            for seed in seeds or [0] * len(prompts)
        ]


class TokenKeeper(ServiceActor):
    """Keeps tokens as the trainer does."""

    def __init__(self) -> None:
        self._tokens = TokenStore()

    @concurrent_endpoint
    async def put_tokens(self, tokens: Mapping[TokenKey, TrajectoryTokens]) -> None:
        self._tokens.put(tokens)

    @concurrent_endpoint
    async def get_tokens(self, keys: Sequence[TokenKey]) -> list[TrajectoryTokens]:
        return self._tokens.get(keys)
