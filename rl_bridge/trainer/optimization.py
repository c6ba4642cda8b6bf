"""The optimizer of one model, with its learning rate schedule and gradient clipping."""

import math
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rl_bridge.config import TrainerConfig
from rl_bridge.errors import NonFiniteLossError
from rl_bridge.titan.model import TitanModel
from rl_bridge.types import PolicyVersion

# After rl_bridge.titan.model, which prepares TorchTitan for machines without an accelerator.
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # isort: skip
from torchtitan.distributed import utils as titan_dist  # isort: skip


class Optimization:
    """AdamW, a learning rate that warms up and decays over the run, and a bound on the gradient's norm."""

    def __init__(self, model: TitanModel, trainer: TrainerConfig, *, learning_rate: float) -> None:
        self._model = model
        self._max_norm = trainer.max_grad_norm
        self._updates_per_iteration = trainer.updates_per_iteration
        optimizer = default_adamw(
            lr=learning_rate, betas=tuple(trainer.betas), weight_decay=trainer.weight_decay
        )
        optimizer.implementation = "fused" if model.device.type == "cuda" else "for-loop"
        self._optimizer = optimizer.build(model_parts=[model.module])
        (group, *_) = next(iter(self._optimizer)).param_groups
        # A checkpoint's values may come from another configuration or another type of device.
        self._configured = {key: group[key] for key in ("betas", "weight_decay", "fused", "foreach")}
        updates = trainer.iterations * trainer.updates_per_iteration
        self._scheduler = LRSchedulersContainer.Config(
            warmup_steps=min(trainer.warmup_updates, updates),
            decay_ratio=trainer.decay_fraction,
            min_lr_factor=trainer.final_lr_factor,
        ).build(optimizers=self._optimizer, training_steps=updates)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        rate: float = self._scheduler.schedulers[0].get_last_lr()[0]
        return rate

    def clip(self, loss: float, *, iteration: int, label: str) -> float:
        """Clip the gradient's norm; returns the norm before.

        If the gradient or the loss is not finite, drops the gradient and raises NonFiniteLossError.
        """
        norm = float(
            titan_dist.clip_grad_norm_(
                list(self._model.module.parameters()),
                self._max_norm,
                foreach=True,
                ep_enabled=self._model.parallel_dims.ep_enabled,
            )
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.drop()
            raise NonFiniteLossError(
                f"expected a finite loss and gradient in iteration {iteration}, got loss {loss} and "
                f"gradient norm {norm} of {label}; nothing of it is in the weights or a checkpoint: --resume goes on "
                "from the newest one. Where it comes again a lower trainer.learning_rate is the usual cure"
            )
        return norm

    def step(self) -> None:
        """Update the weights, advance the schedule and drop the gradient."""
        self._optimizer.step()
        self._scheduler.step()
        self.drop()

    def skip(self) -> None:
        """Advance the schedule without an update."""
        self._scheduler.step()

    def drop(self) -> None:
        """Drop the gradient."""
        self._optimizer.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's part of the weights and of the optimizer's state, without gradients."""
        yield from self._model.module.parameters()
        for optimizer in self._optimizer:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def reapply_config(self, version: PolicyVersion) -> None:
        """Apply this run's configuration after a checkpoint, possibly of another configuration, has been read.

        The schedule's position follows from the version alone.
        """
        with warnings.catch_warnings():  # PyTorch warns of the way in which TorchTitan reads the rate
            warnings.filterwarnings("ignore", "To get the last learning rate", UserWarning)
            self._scheduler.load_state_dict({"last_epoch": version * self._updates_per_iteration})
        for optimizer, scheduler in zip(self._optimizer, self._scheduler, strict=True):
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group.update(lr=rate, **self._configured)

    def state(self, prefix: str = "") -> dict[str, Any]:
        """Return the optimizer's top-level entries of a checkpoint, where stateful objects must be; read in place."""
        return {f"{prefix}optimizer": self._optimizer}
