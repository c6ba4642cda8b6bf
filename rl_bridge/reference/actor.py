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
from rl_bridge.services.options import Turn
from rl_bridge.trainer.settings import TrainerSettings


class ReferenceActor(ServiceActor):
    """Answers batches one after the other, while its process stays responsive. A thin shell around `Reference`.

    Where it shares a GPU with trainer and generators it has a turn for each batch, and loads the model in the first: at
    the start, and when it is started again, others may have theirs for long.

    Args:
        settings: The trainer's.
    """

    REPEATABLE = frozenset({"logprobs"})

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._reference: Reference | None = None
        self._turn = Turn() if settings.colocated else None
        self._answering = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model, unless that takes a turn."""
        if self._turn is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        PROCESS_SPANS.rest("batches")

    @concurrent_endpoint
    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        async with self._answering:
            if self._turn is not None:
                await self._turn.take(self._settings.trainer.timeout_s)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._logprobs, batch)
            finally:
                if self._turn is not None:
                    self._turn.give_back()

    @concurrent_endpoint
    async def close(self) -> None:
        """End the thread, after what is under way."""
        await asyncio.to_thread(self._thread.shutdown)

    def _load(self) -> Reference:
        with span("start"):
            self._reference = Reference(self._settings)
            return self._reference

    def _logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        reference = self._reference or self._load()
        with span("logprobs"):
            try:
                return reference.logprobs(batch)
            finally:
                if self._turn is not None:
                    reference.offload()
