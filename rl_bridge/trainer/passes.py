"""A rank's part of a batch through a model, pass by pass, and what all ranks have come to together."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.trainer.shares import RankBatch

if TYPE_CHECKING:
    from rl_bridge.titan.model import TitanModel


class Passes:
    """Takes parts of a batch through a model. Each rank takes part in the others' collectives, also where it is idle.

    Args:
        model: The model.

    Attributes:
        tokens: Tokens of rows that this rank has made gradients of, since `begin`.
        flops: Floating-point operations of the model for that.
    """

    def __init__(self, model: "TitanModel") -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.tokens, self.flops = 0, 0.0

    def backward(self, mine: RankBatch, update: int, loss: Callable[[TrainBatch], Tensor]) -> float:
        """Add the gradient of an update to what this rank has of the weights.

        Args:
            mine: This rank's part.
            update: Which.
            loss: Of a pass, a scalar; the sum over all passes of all ranks is the update's.

        Returns:
            The update's loss, over all ranks.
        """
        total = 0.0
        for tokens in mine.updates[update]:
            with self._model.spmd():
                if len(tokens):
                    part = mine.batch.take(tokens)
                    one = loss(part)
                    self.tokens += int(part.lengths.sum())
                    self.flops += self._model.train_flops(part)
                else:
                    one = self._model.idle()
                one.backward()  # type: ignore[no-untyped-call]
                total += float(one.detach())
        return float(self._model.sum_over_data(torch.tensor([total], dtype=torch.float64)))

    @torch.no_grad()
    def evaluate(
        self, mine: RankBatch, value: Callable[[TrainBatch], Tensor], *, update: int | None = None
    ) -> NDArray[np.float32]:
        """A number for each loss token of this rank, without gradient.

        Args:
            mine: This rank's part.
            value: Of the tokens of a pass, shape [its T].
            update: Whose tokens; those of others have 0. None for all.

        Returns:
            Shape [the rank's T].
        """
        result = np.zeros(len(mine.batch), dtype=np.float32)
        for tokens in self._tokens(mine.updates if update is None else (mine.updates[update],)):
            with self._model.spmd():
                if len(tokens):
                    result[tokens] = value(mine.batch.take(tokens)).float().cpu().numpy()
                else:
                    self._model.idle()
        return result

    def whole(self, batch: TrainBatch, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """What all ranks have for their loss tokens, float64, shape [the whole batch's T]; the same on every rank.

        Args:
            batch: This rank's tokens.
            values: One each.
        """
        result = torch.zeros(batch.total, dtype=torch.float64)
        result[torch.from_numpy(batch.index)] = torch.from_numpy(values.astype(np.float64))
        found: NDArray[np.float64] = self._model.sum_over_data(result).numpy()
        return found

    @staticmethod
    def _tokens(updates: Sequence[Sequence[NDArray[np.int64]]]) -> Iterator[NDArray[np.int64]]:
        return (tokens for passes in updates for tokens in passes)
