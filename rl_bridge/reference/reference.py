"""Log-probabilities of loss tokens under the frozen initial policy."""

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.titan.logprobs import log_distributions
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
        )

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token, shape [T]."""
        result = np.zeros(len(batch), dtype=np.float32)
        for micro, chosen in batch.micro_batches(self._settings.trainer.micro_batch_size):
            with self._model.spmd():
                distribution = log_distributions(self._model, micro, temperature=self._settings.temperature)
            target = torch.from_numpy(micro.target).to(distribution.device)
            result[chosen] = distribution.gather(-1, target.unsqueeze(-1)).squeeze(-1).cpu().numpy()
        return result
