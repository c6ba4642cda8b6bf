"""The gradient of the policy's loss over one update, and what the policy says of a batch."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.policy_loss import LossInputs, LossSettings, policy_loss, token_weights
from rl_bridge.algorithms.surrogate import sequence_means
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.titan.model import TitanModel
from rl_bridge.titan.output import TokenOutputs
from rl_bridge.trainer.figures import FigureAccumulator
from rl_bridge.trainer.passes import Passes
from rl_bridge.trainer.settings import TrainerSettings


class Gradients:
    """Accumulates a batch's gradient, whatever is in a pass and whoever makes it.

    Args:
        model: Its gradients are added to.
        settings: The sizes of passes, the aggregation, the ratio and the temperature.
    """

    def __init__(self, model: TitanModel, settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings
        self._passes = Passes(model, settings)

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The log-probability of each loss token under the weights as they are, shape [T]; the same on every rank."""

        def chosen(micro: TrainBatch) -> Tensor:
            rows = self._model.pack(micro)
            return self._model.outputs(rows, temperature=self._settings.temperature).logprobs

        return self._passes.evaluate(batch, chosen)

    def accumulate(
        self,
        batch: TrainBatch,
        loss_settings: LossSettings,
        accumulator: FigureAccumulator,
        *,
        fresh: NDArray[np.bool_] | None,
    ) -> float:
        """Add the gradient of a batch to what each rank has of the weights.

        Ratios of sequences take a pass forward of their own first: the tokens of one may be in different passes.

        Args:
            batch: The loss tokens of one update, the same on every rank.
            loss_settings: What the loss is.
            accumulator: Takes the figures of this rank's part.
            fresh: As for `FigureAccumulator.add`.

        Returns:
            The loss, over all ranks.
        """
        # These are of the whole batch, so the parts of micro-batches and ranks simply add up.
        whole = _Whole(
            weights=token_weights(
                batch.trajectory,
                aggregation=self._settings.algorithm.aggregation,
                max_length=self._settings.max_loss_tokens,
            ),
            sequence_log_ratios=self._sequence_log_ratios(batch),
        )

        def loss(micro: TrainBatch, chosen: NDArray[np.int64]) -> Tensor:
            rows = self._model.pack(micro)
            outputs = self._model.outputs(rows, temperature=self._settings.temperature)
            inputs = self._inputs(micro, outputs, whole.take(chosen))
            value, figures = policy_loss(inputs, loss_settings)
            accumulator.add(figures, fresh=None if fresh is None else self._tensor(fresh[chosen]))
            accumulator.add_rows(valid=int(micro.lengths.sum()), padded=rows.tokens.size)
            return value

        return self._passes.backward(batch, loss)

    def _sequence_log_ratios(self, batch: TrainBatch) -> NDArray[np.float32] | None:
        if self._settings.algorithm.ratio == "token":
            return None
        old = batch.old_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        return sequence_means(self.logprobs(batch) - old, batch.trajectory)

    def _inputs(self, micro: TrainBatch, outputs: TokenOutputs, whole: "_Whole") -> LossInputs:
        def tensor(values: NDArray[np.float32] | None) -> Tensor | None:
            return None if values is None else self._tensor(values)

        assert outputs.entropy is not None
        return LossInputs(
            logprobs=outputs.logprobs,
            entropy=outputs.entropy,
            old_logprobs=self._tensor(micro.old_logprobs),
            advantages=self._tensor(micro.advantages),
            weights=self._tensor(whole.weights),
            reference_logprobs=tensor(micro.reference_logprobs),
            proximal_logprobs=tensor(micro.proximal_logprobs),
            sequence_log_ratios=tensor(whole.sequence_log_ratios),
        )

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Whole:
    """What each token has from the whole of its update, each of shape [T]."""

    weights: NDArray[np.float32]
    sequence_log_ratios: NDArray[np.float32] | None

    def take(self, chosen: NDArray[np.int64]) -> "_Whole":
        ratios = self.sequence_log_ratios
        return _Whole(
            weights=self.weights[chosen], sequence_log_ratios=None if ratios is None else ratios[chosen]
        )
