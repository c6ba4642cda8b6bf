"""The reference policy: log-probabilities of loss tokens under the initial weights."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.titan.model import TitanModel
from rl_bridge.trainer.passes import architecture_at, divide_contexts, with_shared_prefixes
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.trainer.weights import Offload


class Reference:
    """A frozen model that computes log-probabilities of batches, with the trainer's lengths and temperature."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._offload = Offload()
        self._architecture = architecture_at(Path(settings.model_path))
        torch.set_num_threads(settings.config.trainer.num_threads)
        self._model = TitanModel(
            settings.model_path,
            dtype=settings.config.model.dtype,
            max_length=settings.config.rollout.max_length,
            trainable=False,
            device=own_device(),
            chunk=settings.config.trainer.tokens_per_chunk,
        )

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probability of each loss token, shape [T]."""
        self._offload.restore()
        result = np.zeros(len(batch), dtype=np.float32)
        if self._settings.config.shares_prefixes:
            batch = with_shared_prefixes(batch, self._architecture)
        (passes,) = divide_contexts(batch, self._architecture, ranks=1, budget=self._settings.tokens_per_pass)
        for contexts in passes:
            tokens = np.flatnonzero(np.isin(batch.context, contexts))
            rows = self._model.pack(batch.take(tokens))
            with self._model.spmd():
                outputs = self._model.outputs(rows, temperature=self._settings.config.rollout.temperature)
            result[tokens] = outputs.logprobs.cpu().numpy()
        return result

    def offload(self) -> None:
        """Move the weights to the host's memory until they are needed, to free the device's."""
        # Without a backward pass FSDP keeps the last layer gathered, and `parameters()` would be the gathered copy; a
        # state dict frees that and has the weights themselves.
        self._offload.release(self._model.module.state_dict().values())
