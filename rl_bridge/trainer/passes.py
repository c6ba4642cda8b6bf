"""A batch through a model, in passes that follow each other and are shared out over ranks."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.buffer.batch import TrainBatch, pack
from rl_bridge.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from rl_bridge.titan.model import TitanModel

Part = tuple[TrainBatch, NDArray[np.int64]]
"""The loss tokens of one pass, and their indices in the whole batch."""


class Passes:
    """Divides batches. All ranks make the same number of passes, some of them idle: each takes part in collectives.

    Args:
        model: Whom the passes go through.
        settings: Their sizes.
    """

    def __init__(self, model: "TitanModel", settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings

    def backward(self, batch: TrainBatch, loss: Callable[[TrainBatch, NDArray[np.int64]], Tensor]) -> float:
        """Add the gradient of a batch to what each rank has of the weights.

        Args:
            batch: The same on every rank.
            loss: Of a part, given its indices in the batch; a scalar, the sum over parts being the batch's.

        Returns:
            The batch's loss, over all ranks.
        """
        total = 0.0
        for part in self._own(batch):
            with self._model.spmd():
                one = self._model.idle() if part is None else loss(*part)
                one.backward()  # type: ignore[no-untyped-call]
                total += float(one.detach())
        return float(self._model.sum_over_data(torch.tensor([total], dtype=torch.float64)))

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch, value: Callable[[TrainBatch], Tensor]) -> NDArray[np.float32]:
        """A number for each loss token, without gradient.

        Args:
            batch: The same on every rank.
            value: Of the tokens of a part, shape [its T].

        Returns:
            The same on every rank, shape [T].
        """
        result = torch.zeros(len(batch), dtype=torch.float32)
        for part in self._own(batch):
            with self._model.spmd():
                if part is None:
                    self._model.idle()
                else:
                    micro, chosen = part
                    result[torch.from_numpy(chosen)] = value(micro).float().cpu()
        found: NDArray[np.float32] = self._model.sum_over_data(result).numpy()
        return found

    def _own(self, batch: TrainBatch) -> Iterator[Part | None]:
        """This rank's parts; None where it has to be idle."""
        parts = list(batch.micro_batches(self._rows_a_pass(batch)))
        first, ranks = self._model.data_rank, self._model.data_ranks
        for start in range(0, len(parts), ranks):
            yield parts[start + first] if start + first < len(parts) else None

    def _rows_a_pass(self, batch: TrainBatch) -> int:
        rows = pack(batch.lengths).rows
        passes = self._settings.gradient_accumulation_steps * self._model.data_ranks
        # The most with which there are as many passes as that: n rows make ceil(rows / n) of them.
        most = rows if passes == 1 else max(1, math.ceil(rows / (passes - 1)) - 1)
        return min(self._settings.trainer.micro_batch_size, most)
