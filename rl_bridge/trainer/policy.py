"""The gradient of the policy's loss over one update, and what the policy says of a batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.functions import load_loss
from rl_bridge.algorithms.policy_loss import LossInputs
from rl_bridge.algorithms.surrogate import sequence_means
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig
from rl_bridge.titan.model import TitanModel
from rl_bridge.trainer.metrics import LossMetrics
from rl_bridge.trainer.passes import Passes
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.trainer.shares import RankBatch


class PolicyGradients:
    """Accumulates an update's gradient, whatever is in a pass and whoever makes it.

    Args:
        model: Its gradients are added to.
        settings: The loss, the ratio and the temperature.

    Raises:
        ConfigError: There is no such loss.
    """

    def __init__(self, model: TitanModel, settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings
        self._loss = load_loss(settings.algorithm.loss)
        self.passes = Passes(model)

    def logprobs(self, mine: RankBatch, *, update: int | None = None) -> NDArray[np.float32]:
        """The log-probability of each of this rank's loss tokens under the weights as they are; see `evaluate`."""

        def chosen(part: TrainBatch) -> Tensor:
            rows = self._model.pack(part)
            return self._model.outputs(rows, temperature=self._settings.temperature).logprobs

        return self.passes.evaluate(mine, chosen, update=update)

    def accumulate(
        self,
        mine: RankBatch,
        update: int,
        settings: AlgorithmConfig,
        metrics: LossMetrics,
        *,
        fresh: int | None,
    ) -> float:
        """Add the gradient of an update to what each rank has of the weights.

        Ratios of sequences take a pass forward of their own first: the tokens of one may be in different passes.

        Args:
            mine: This rank's part.
            update: Which.
            settings: What the loss is.
            metrics: Takes those of this rank's part.
            fresh: The version of tokens that the very weights have sampled that the trainer holds; None after the
                iteration's first update.

        Returns:
            The loss, over all ranks.

        Raises:
            TrainingError: What the loss gives is none.
        """
        ratios = self._sequence_log_ratios(mine, update)

        def loss(part: TrainBatch) -> Tensor:
            rows = self._model.pack(part)
            outputs = self._model.outputs(rows, temperature=self._settings.temperature)
            assert outputs.entropy is not None
            assert part.weights is not None
            old_logprobs = self._tensor(part.old_logprobs)
            inputs = LossInputs(
                logprobs=outputs.logprobs,
                entropy=outputs.entropy,
                old_logprobs=old_logprobs,
                advantages=self._tensor(part.advantages),
                reference_logprobs=self._optional(part.reference_logprobs),
                proximal_logprobs=self._optional(part.proximal_logprobs),
                sequence_log_ratios=None if ratios is None else self._tensor(ratios[part.index]),
            )
            per_token, found = self._loss(inputs, settings)
            metrics.add({**found, "policy/entropy": outputs.entropy.detach()})
            if fresh is not None:
                difference = outputs.logprobs.detach() - old_logprobs
                metrics.add_mismatch(difference, fresh=self._tensor(part.versions == fresh))
            metrics.add_rows(valid=int(part.lengths.sum()), padded=rows.tokens.size)
            return torch.sum(self._tensor(part.weights) * per_token)

        return self.passes.backward(mine, update, loss)

    def _sequence_log_ratios(self, mine: RankBatch, update: int) -> NDArray[np.float32] | None:
        """Of each token of the whole batch."""
        if self._settings.algorithm.ratio == "token":
            return None
        batch = mine.batch
        old = batch.old_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        log_ratios = self.logprobs(mine, update=update) - old
        trajectory = self.passes.whole(batch, batch.trajectory).astype(np.int64)
        return sequence_means(self.passes.whole(batch, log_ratios), trajectory)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)

    def _optional(self, values: NDArray[np.float32] | None) -> Tensor | None:
        return None if values is None else self._tensor(values)
