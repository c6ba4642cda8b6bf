"""The reference policy: log-probabilities of loss tokens under the initial weights."""

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.titan.model import TitanModel
from rl_bridge.titan.ranks import SINGLE_RANK, Rank, convert_rank_errors, join_process_group, limit_waits
from rl_bridge.trainer.passes import Passes, frozen_batch
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.trainer.weights import Offload


class Reference:
    """A frozen model that computes log-probabilities of batches, with the trainer's lengths and temperature.

    Every rank has one, and each method is called on all ranks with the same arguments.
    """

    def __init__(self, settings: TrainerSettings, rank: Rank = SINGLE_RANK) -> None:
        self._settings, self._rank = settings, rank
        self._offload = Offload()
        torch.set_num_threads(settings.config.trainer.num_threads)
        device = own_device()
        join_process_group(device, rank)
        with convert_rank_errors("while the reference was loaded"):
            self._model = TitanModel(
                settings.model_path,
                dtype=settings.config.model.dtype,
                max_length=settings.config.rollout.max_length,
                trainable=False,
                device=device,
                parallel=settings.config.reference_parallel,
                chunk=settings.config.trainer.tokens_per_chunk,
            )
        limit_waits(rank.timeout_s)
        self._passes = Passes(self._model)

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the log-probability of each loss token, shape [T]."""
        self._offload.restore()
        own = frozen_batch(batch, self._settings, rank=self._rank.index, ranks=self._rank.count)
        with convert_rank_errors("for a batch of the reference"):
            return self._passes.gather_values(own.batch, self._passes.evaluate(own, self._compute)).astype(
                np.float32
            )

    def _compute(self, micro_batch: TrainBatch) -> torch.Tensor:
        temperature = self._settings.config.rollout.temperature
        return self._model.outputs(self._model.pack(micro_batch), temperature=temperature).logprobs

    def offload(self) -> None:
        """Move the weights to the host's memory until they are needed, to free the device's."""
        # Without a backward pass FSDP keeps the last layer gathered, and `parameters()` would be the gathered copy; a
        # state dict frees that and has the weights themselves.
        self._offload.release(self._model.module.state_dict().values())
