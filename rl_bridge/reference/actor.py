"""The reference policy as a Monarch actor."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from monarch.actor import concurrent_endpoint
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.reference.reference import Reference
from rl_bridge.services.actor import ServiceActor
from rl_bridge.trainer.settings import TrainerSettings


class ReferenceActor(ServiceActor):
    """Answers batches one after the other, while its process stays responsive. A thin shell around `Reference`.

    Args:
        settings: The trainer's.
    """

    REPEATABLE = frozenset({"logprobs"})

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model."""
        self._reference = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        PROCESS_SPANS.rest("batches")

    @concurrent_endpoint
    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._logprobs, batch)

    @concurrent_endpoint
    async def close(self) -> None:
        """End the thread, after what is under way."""
        await asyncio.to_thread(self._thread.shutdown)

    def _load(self) -> Reference:
        with span("start"):
            return Reference(self._settings)

    def _logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        with span("logprobs"):
            return self._reference.logprobs(batch)
