"""The gradient of one update: the batch in passes, one after the other and shared out over ranks."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.algorithms.aggregation import token_weights
from rl_bridge.algorithms.policy_loss import LossInputs, LossSettings, policy_loss
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.packing import pack
from rl_bridge.titan.logprobs import rows_log_distributions
from rl_bridge.titan.model import TitanModel
from rl_bridge.trainer.figures import FigureAccumulator
from rl_bridge.trainer.settings import TrainerSettings


class Gradients:
    """Accumulates a batch's gradient, whatever is in a pass and whoever makes it.

    Args:
        model: Its gradients are added to.
        settings: The sizes of passes, the aggregation and the temperature.
    """

    def __init__(self, model: TitanModel, settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings

    def accumulate(
        self,
        batch: TrainBatch,
        loss_settings: LossSettings,
        accumulator: FigureAccumulator,
        *,
        fresh: NDArray[np.bool_],
    ) -> float:
        """Add the gradient of a batch to what each rank has of the weights.

        Args:
            batch: The loss tokens of one update, the same on every rank.
            loss_settings: What the loss is.
            accumulator: Takes the figures of this rank's part.
            fresh: As for `FigureAccumulator.add`.

        Returns:
            The loss, over all ranks.
        """
        # Weights are those of the whole batch, so the parts of micro-batches and ranks simply add up.
        weights = token_weights(
            batch.trajectory,
            aggregation=self._settings.algorithm.aggregation,
            max_length=self._settings.max_loss_tokens,
        )
        parts = list(batch.micro_batches(self._rows_a_pass(batch)))
        first, ranks = self._model.data_rank, self._model.data_ranks
        total = 0.0
        for start in range(0, len(parts), ranks):
            with self._model.spmd():
                if start + first < len(parts):
                    micro, chosen = parts[start + first]
                    total += self._pass(
                        micro, weights[chosen], loss_settings, accumulator, fresh=fresh[chosen]
                    )
                else:
                    self._idle_pass()
        return float(self._model.sum_over_data(torch.tensor([total], dtype=torch.float64)))

    def _rows_a_pass(self, batch: TrainBatch) -> int:
        rows = pack(batch.lengths).rows
        passes = self._settings.gradient_accumulation_steps * self._model.data_ranks
        return min(self._settings.trainer.micro_batch_size, math.ceil(rows / passes))

    def _pass(
        self,
        micro: TrainBatch,
        weights: NDArray[np.float32],
        loss_settings: LossSettings,
        accumulator: FigureAccumulator,
        *,
        fresh: NDArray[np.bool_],
    ) -> float:
        device, reference = self._model.device, micro.reference_logprobs
        rows = micro.packed(multiple_of=self._model.row_multiple)
        loss, figures = policy_loss(
            LossInputs(
                log_distribution=rows_log_distributions(
                    self._model, rows, temperature=self._settings.temperature
                ),
                targets=torch.from_numpy(micro.target).to(device),
                old_logprobs=torch.from_numpy(micro.old_logprobs).to(device),
                advantages=torch.from_numpy(micro.advantages).to(device),
                weights=torch.from_numpy(weights).to(device),
                reference_logprobs=None if reference is None else torch.from_numpy(reference).to(device),
            ),
            loss_settings,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        accumulator.add(figures, fresh=torch.from_numpy(fresh).to(device))
        accumulator.add_rows(valid=int(micro.lengths.sum()), padded=rows.tokens.size)
        return float(loss.detach())

    def _idle_pass(self) -> None:
        """Take part in the others' collectives without a share of the batch."""
        tokens = torch.zeros((1, self._model.row_multiple), dtype=torch.int64, device=self._model.device)
        (self._model.logits(tokens).sum() * 0.0).backward()  # type: ignore[no-untyped-call]
