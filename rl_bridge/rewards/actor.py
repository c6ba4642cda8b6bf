"""Rewards as Monarch services."""

import asyncio
from typing import Any

from monarch.actor import concurrent_endpoint

from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.rewards.pool import RewardCounts, RewardPool
from rl_bridge.rewards.settings import RewardModelSettings, RewardSettings
from rl_bridge.services.actor import ServiceActor


class RewardActor(ServiceActor):
    """A thin shell around `RewardPool`: verifiable rewards."""

    REPEATABLE = frozenset({"evaluate_response"})

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings

    @concurrent_endpoint
    async def setup(self) -> None:
        """Start the processes."""
        settings = self._settings
        self._pool = RewardPool(
            settings.ensemble.functions,
            workers=settings.workers,
            timeout_s=settings.timeout_s,
            start_timeout_s=settings.start_timeout_s,
            drop_failures=settings.drop_failures,
        )
        await self._pool.__aenter__()
        PROCESS_SPANS.rest("responses")

    @concurrent_endpoint
    async def evaluate_response(self, prompt: Any, response: str, target: Any) -> float | None:
        """Evaluate a response; see `RewardPool.evaluate` and `Ensemble.reward`."""

        async def vote(function: int) -> float | None:
            return await self._pool.evaluate(
                prompt=prompt, response=response, target=target, function=function
            )

        with PROCESS_SPANS.call(), span("evaluate", waits_for="reward functions"):
            return await self._settings.ensemble.evaluate(vote)

    @concurrent_endpoint
    async def counts(self) -> RewardCounts:
        """What became of evaluations."""
        return self._pool.counts

    @concurrent_endpoint
    async def pids(self) -> list[int]:
        """The processes that call the functions."""
        return self._pool.pids

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

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model."""
        from rl_bridge.rewards.model import RewardBatches, RewardModel

        model = await asyncio.to_thread(RewardModel, self._settings)
        self._batches = RewardBatches(model.score, max_batch=self._settings.max_batch)
        PROCESS_SPANS.rest("responses")

    @concurrent_endpoint
    async def evaluate_response(self, prompt: Any, response: str, target: Any = None) -> float | None:
        """Evaluate a response; None where it is longer than the model may see."""
        return await self._batches.evaluate(prompt, response)

    @concurrent_endpoint
    async def health(self) -> None:
        """Raise where the model does."""
        await self._batches.evaluate("Are you well?", "Yes.")
