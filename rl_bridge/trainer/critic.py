"""PPO's critic: a value head on a body of its own, trained beside the policy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.advantages import value_loss
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.titan.model import TitanModel
from rl_bridge.trainer.optimization import Optimization
from rl_bridge.trainer.passes import Passes, RankBatch
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion

_PREFIX = "critic_"
_MODEL = f"{_PREFIX}model"


class Critic:
    """Estimates the values of states and learns from the returns. It is on every rank, like the policy.

    It starts with the policy's body and a value of 0 everywhere. With LoRA it trains its own adapters and the head.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._model = TitanModel(
            settings.model_path,
            dtype=settings.config.model.dtype,
            max_length=settings.config.rollout.max_length,
            trainable=True,
            value_head=True,
            device=own_device(),
            parallel=settings.config.trainer.parallel,
            activation_checkpointing=settings.config.trainer.activation_checkpointing,
            compile=settings.config.trainer.compile,
            lora=settings.config.model.lora,
            seed=settings.config.seed,
            options=settings.config.trainer.options,
        )
        rate = settings.config.algorithm.critic_learning_rate or settings.config.trainer.learning_rate
        self.optimization = Optimization(self._model, settings.config.trainer, learning_rate=rate)
        self.passes = Passes(self._model)
        self._losses: list[float] = []
        self._norms: list[float] = []

    def values(self, rank_batch: RankBatch) -> NDArray[np.float32]:
        """Return the value of the state before each of this rank's loss tokens, shape [T]."""
        return self.passes.evaluate(rank_batch, self._compute_values)

    def _compute_values(self, micro_batch: TrainBatch) -> Tensor:
        return self._model.outputs(self._model.pack(micro_batch)).logprobs

    def accumulate(self, rank_batch: RankBatch, update: int, *, iteration: int) -> None:
        """Accumulate and clip one update's gradient: that of the mean value loss over the update's tokens.

        Raises as `Optimization.clip` does.
        """

        def loss(micro_batch: TrainBatch) -> Tensor:
            assert micro_batch.values is not None
            assert micro_batch.returns is not None
            returns, values = (
                torch.from_numpy(array).to(self._model.device)
                for array in (micro_batch.returns, micro_batch.values)
            )
            clip = self._settings.config.algorithm.value_clip
            return (
                value_loss(self._compute_values(micro_batch), returns, values, clip=clip).sum()
                / rank_batch.sizes[update]
            )

        total_loss = self.passes.backward(rank_batch, update, loss)
        self._norms.append(self.optimization.clip(total_loss, iteration=iteration, label="the critic"))
        self._losses.append(total_loss)

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of the updates since the last call, by their names in the log.

        `critic/explained_variance` is 1 - Var(R - V) / Var(R) with the values before the first of these updates: 1 if
        they equal the returns, 0 if they are no better than a constant.
        """
        assert batch.values is not None
        assert batch.returns is not None
        losses, self._losses = self._losses, []
        norms, self._norms = self._norms, []
        values, returns = (self.passes.gather_values(batch, array) for array in (batch.values, batch.returns))
        variance = float(returns.var())
        return {
            "critic/loss": sum(losses) / len(losses),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/value_mean": float(values.mean()),
            "critic/explained_variance": 1.0 - float((returns - values).var()) / variance
            if variance
            else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Return the critic's top-level entries of a checkpoint; they are read in place when one is loaded."""
        return {_MODEL: self._model.trained_state(), **self.optimization.state(_PREFIX)}

    def restore(self, state: Mapping[str, Any], version: PolicyVersion) -> None:
        """Load the state into which a checkpoint of `version` was read."""
        self._model.load_trained(state[_MODEL])
        self.optimization.reapply_config(version)
