"""Rewards as Monarch services."""

import asyncio
from typing import Any

from monarch.actor import concurrent_endpoint

from rl_bridge.config.sections import RewardConfig
from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.rewards.function import count_votes
from rl_bridge.rewards.pool import RewardPool
from rl_bridge.services.actor import ServiceActor


class RewardActor(ServiceActor):
    """Serves verifiable rewards from a `RewardPool`."""

    REPEATABLE = frozenset({"evaluate_response"})

    def __init__(self, reward: RewardConfig) -> None:
        self._config = reward

    @concurrent_endpoint
    async def setup(self) -> None:
        """Start the processes."""
        self._pool = RewardPool(self._config)
        await self._pool.__aenter__()
        PROCESS_SPANS.rest("responses")

    @concurrent_endpoint
    async def evaluate_response(self, prompt: Any, response: str, target: Any) -> float | None:
        """Have all functions vote on a response concurrently, and count the votes; see `RewardPool.evaluate`."""
        with PROCESS_SPANS.call(), span("evaluate", waits_for="reward functions"):
            votes: list[Any] = await asyncio.gather(
                *(
                    self._pool.evaluate(prompt=prompt, response=response, target=target, function=number)
                    for number in range(len(self._config.functions))
                ),
                return_exceptions=True,
            )
        for outcome in votes:  # raised only after all have ended
            if isinstance(outcome, BaseException):
                raise outcome
        return count_votes(votes, self._config)

    @concurrent_endpoint
    async def health(self) -> None:
        """Raise RewardError if the pool can start no more processes."""
        self._pool.check()

    @concurrent_endpoint
    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


class RewardModelActor(ServiceActor):
    """Serves learned rewards from a `RewardModel`, which ignores the target."""

    REPEATABLE = frozenset({"evaluate_response"})

    def __init__(self, model_path: str, max_length: int) -> None:
        self._model_path = model_path
        self._max_length = max_length

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model."""
        from rl_bridge.rewards.model import MAX_BATCH, RewardBatches, RewardModel

        model = await asyncio.to_thread(RewardModel, self._model_path, max_length=self._max_length)
        self._batches = RewardBatches(model.score, max_batch=MAX_BATCH)
        PROCESS_SPANS.rest("responses")

    @concurrent_endpoint
    async def evaluate_response(self, prompt: Any, response: str, target: Any = None) -> float | None:
        """Score a response; None if prompt and response are longer than the model's limit."""
        return await self._batches.evaluate(prompt, response)

    @concurrent_endpoint
    async def health(self) -> None:
        """Raise RewardError if the model fails."""
        await self._batches.evaluate("Are you well?", "Yes.")
