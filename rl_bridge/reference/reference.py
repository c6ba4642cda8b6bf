"""Log-probabilities of loss tokens under the frozen initial policy, and one replica of it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.metrics.spans import PROCESS_SPANS, span
from rl_bridge.titan.model import TitanModel
from rl_bridge.trainer.settings import TrainerSettings


class Reference:
    """A frozen model, asked in batches.

    Args:
        settings: The trainer's: both must see the same model, lengths and temperature.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        torch.set_num_threads(settings.trainer.num_threads)
        self._model = TitanModel(
            settings.model_path,
            dtype=settings.dtype,
            max_length=settings.max_length,
            trainable=False,
            device=own_device(),
            chunk=settings.trainer.tokens_per_chunk,
        )

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        result = np.zeros(len(batch), dtype=np.float32)
        for micro, chosen in batch.micro_batches(self._settings.trainer.micro_batch_size):
            with self._model.spmd():
                outputs = self._model.outputs(self._model.pack(micro), temperature=self._settings.temperature)
            result[chosen] = outputs.logprobs.cpu().numpy()
        return result


class ReferenceReplica:
    """Answers batches one after the other, while its process stays responsive.

    Args:
        settings: The trainer's: both must see the same model, lengths and temperature.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")

    async def setup(self) -> None:
        """Load the model.

        Raises:
            ModelError: The checkpoint cannot be loaded.
        """
        self._reference = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        PROCESS_SPANS.rest("batches")

    async def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._logprobs, batch)

    async def close(self) -> None:
        """End the thread, after what is under way."""
        await asyncio.to_thread(self._thread.shutdown)

    def _load(self) -> Reference:
        with span("start"):
            return Reference(self._settings)

    def _logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        with span("logprobs"):
            return self._reference.logprobs(batch)
