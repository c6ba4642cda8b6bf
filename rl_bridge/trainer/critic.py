"""The critic of PPO: a value head on a body of its own, trained beside the policy."""

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
    """Estimates the value of states, and learns from the returns. On every rank, like the policy.

    It begins with the policy's body and a value of 0 everywhere. With LoRA it has adapters of its own, and a head.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._model = TitanModel(
            settings.model_path,
            dtype=settings.dtype,
            max_length=settings.max_length,
            trainable=True,
            value_head=True,
            device=own_device(),
            tensor_parallel=settings.trainer.tensor_parallel,
            activation_checkpointing=settings.trainer.activation_checkpointing,
            compile=settings.trainer.compile,
            lora=settings.lora,
            seed=settings.seed,
        )
        rate = settings.algorithm.critic_learning_rate or settings.trainer.learning_rate
        self.optimization = Optimization(self._model, settings.trainer, learning_rate=rate)
        self.passes = Passes(self._model)
        self._losses: list[float] = []
        self._norms: list[float] = []

    def values(self, rank_batch: RankBatch) -> NDArray[np.float32]:
        """The value of the state before each of this rank's loss tokens, shape [T]."""
        return self.passes.evaluate(rank_batch, self._values)

    def _values(self, micro_batch: TrainBatch) -> Tensor:
        return self._model.outputs(self._model.pack(micro_batch)).logprobs

    def accumulate(self, rank_batch: RankBatch, update: int, *, iteration: int) -> None:
        """Make the gradient of one update: the mean of the value loss over its tokens.

        Raises as `Optimization.clip`.
        """

        def loss(micro_batch: TrainBatch) -> Tensor:
            assert micro_batch.values is not None
            assert micro_batch.returns is not None
            returns, values = (
                torch.from_numpy(array).to(self._model.device)
                for array in (micro_batch.returns, micro_batch.values)
            )
            clip = self._settings.algorithm.value_clip
            return (
                value_loss(self._values(micro_batch), returns, values, clip=clip).sum()
                / rank_batch.sizes[update]
            )

        total_loss = self.passes.backward(rank_batch, update, loss)
        self._norms.append(self.optimization.clip(total_loss, iteration=iteration, label="the critic"))
        self._losses.append(total_loss)

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Of the updates since the last call, by the names that the log uses.

        `critic/explained_variance` is 1 - Var(R - V) / Var(R), of the values before the first of them: 1 of a critic
        that knew the returns, 0 of one that knew their mean at best.
        """
        assert batch.values is not None
        assert batch.returns is not None
        losses, self._losses = self._losses, []
        norms, self._norms = self._norms, []
        values, returns = (self.passes.whole(batch, array) for array in (batch.values, batch.returns))
        spread = float(returns.var())
        return {
            "critic/loss": sum(losses) / len(losses),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/value_mean": float(values.mean()),
            "critic/explained_variance": 1.0 - float((returns - values).var()) / spread if spread else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, at its top; read in place when one is loaded."""
        return {_MODEL: self._model.trained_state(), **self.optimization.state(_PREFIX)}

    def restore(self, state: Mapping[str, Any], version: PolicyVersion) -> None:
        """Take what a checkpoint of a version was read into."""
        self._model.load_trained(state[_MODEL])
        self.optimization.after_restore(version)
