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
    """A thin shell around `RewardPool`: verifiable rewards."""

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
        """Have every function vote on a response, all at once, and count; see `RewardPool.evaluate`."""
        with PROCESS_SPANS.call(), span("evaluate", waits_for="reward functions"):
            votes: list[Any] = await asyncio.gather(
                *(
                    self._pool.evaluate(prompt=prompt, response=response, target=target, function=number)
                    for number in range(len(self._config.functions))
                ),
                return_exceptions=True,
            )
        for outcome in votes:  # when all have ended
            if isinstance(outcome, BaseException):
                raise outcome
        return count_votes(votes, self._config)

    @concurrent_endpoint
    async def health(self) -> None:
        """Raise where there can be no processes any more."""
        self._pool.check()

    @concurrent_endpoint
    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


class RewardModelActor(ServiceActor):
    """A thin shell around `RewardModel`: learned rewards. The target plays no part in them."""

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
        """Evaluate a response; None where it is longer than the model may see."""
        return await self._batches.evaluate(prompt, response)

    @concurrent_endpoint
    async def health(self) -> None:
        """Raise where the model does."""
        await self._batches.evaluate("Are you well?", "Yes.")
