"""One process of training: a TorchTitan model, its optimizer, schedule, clipping and checkpoints."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rl_bridge.algorithms.aggregation import token_weights
from rl_bridge.algorithms.policy_loss import LossInputs, LossSettings, policy_loss
from rl_bridge.algorithms.regularizers import held_then_annealed
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.errors import ModelError, NonFiniteLoss
from rl_bridge.titan.logprobs import log_distributions
from rl_bridge.titan.model import TitanModel, own_device
from rl_bridge.trainer.figures import FigureAccumulator
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion

# After rl_bridge.titan.model, which tells TorchTitan about machines without an accelerator.
from torchtitan.components.checkpoint import CheckpointManager  # isort: skip
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # isort: skip
from torchtitan.distributed import utils as titan_dist  # isort: skip


class Trainer:
    """Turns batches into better weights.

    Args:
        settings: See `TrainerSettings`.

    Attributes:
        version: Iterations trained so far; what a snapshot of the weights is called.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        config = settings.trainer
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(settings.seed)
        device = own_device()
        self._model = TitanModel(
            settings.model_path,
            dtype=settings.dtype,
            max_length=settings.max_length,
            trainable=True,
            device=device,
        )
        parts = [self._model.module]
        optimizer = default_adamw(
            lr=config.learning_rate, betas=tuple(config.betas), weight_decay=config.weight_decay
        )
        optimizer.implementation = "fused" if device.type == "cuda" else "for-loop"
        self._optimizer = optimizer.build(model_parts=parts)
        updates = config.iterations * config.updates_per_iteration
        self._scheduler = LRSchedulersContainer.Config(
            warmup_steps=min(config.warmup_updates, updates),
            decay_ratio=config.decay_fraction,
            min_lr_factor=config.final_lr_factor,
        ).build(optimizers=self._optimizer, training_steps=updates)
        self.version: PolicyVersion = 0
        self._shuffle = np.random.default_rng(settings.seed)
        self._checkpoints = CheckpointManager.Config(
            enable=config.checkpoint_interval > 0,
            interval=max(1, config.checkpoint_interval),
            keep_latest_k=2,
            last_save_model_only=False,
            initial_load_model_only=False,
        ).build(
            dataloader=None,
            model_parts=parts,
            optimizers=self._optimizer,
            lr_schedulers=self._scheduler,
            states={"train_state": self},
            sd_adapter=self._model.adapter,
            base_folder=settings.folder,
        )

    def resume(self) -> PolicyVersion:
        """Load the newest checkpoint of the run's folder, if there is one.

        Returns:
            The version that the weights have now; 0 where there was no checkpoint.

        Raises:
            ModelError: The checkpoint is damaged, or of another model.
        """
        try:
            self._checkpoints.load()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise ModelError(
                f"cannot resume from the checkpoints in {self._settings.folder!r}: {error}; "
                "remove the newest one to go on from the one before"
            ) from error
        return self.version

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train one iteration on a batch.

        Args:
            batch: The loss tokens, with reference log-probabilities where `kl_coef` is above 0.

        Returns:
            The figures of the iteration, by the names that the log uses.

        Raises:
            NonFiniteLoss: The loss or the gradient is not finite. That update was not applied.
        """
        config = self._settings.trainer
        loss_settings = self._loss_settings()
        accumulator = FigureAccumulator()
        losses: list[float] = []
        norms: list[float] = []
        learning_rate = self._scheduler.schedulers[0].get_last_lr()[0]
        for part in batch.split_by_trajectory(config.updates_per_iteration, self._shuffle):
            losses.append(self._backward(part, loss_settings, accumulator, fresh=not losses))
            norms.append(self._update(losses[-1]))
        for _ in range(len(losses), config.updates_per_iteration):
            self._scheduler.step()  # too few trajectories came for every update; the schedule goes by iterations
        self.version += 1
        return {
            "loss/total": sum(losses) / len(losses),
            "train/grad_norm": sum(norms) / len(norms),
            "train/learning_rate": learning_rate,
            "train/entropy_coef": loss_settings.entropy_coef,
            **accumulator.result(),
        }

    def _loss_settings(self) -> LossSettings:
        algorithm = self._settings.algorithm
        settings = LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            entropy_coef=algorithm.entropy_coef,
            kl_coef=algorithm.kl_coef,
        )
        coefficient = held_then_annealed(
            self.version / self._settings.trainer.iterations,
            value=algorithm.entropy_coef,
            hold=algorithm.entropy_hold,
            final_factor=algorithm.entropy_final_factor,
        )
        return replace(settings, entropy_coef=coefficient)

    def _backward(
        self, batch: TrainBatch, loss_settings: LossSettings, accumulator: FigureAccumulator, *, fresh: bool
    ) -> float:
        weights = token_weights(
            batch.trajectory,
            aggregation=self._settings.algorithm.aggregation,
            max_length=self._settings.max_loss_tokens,
        )
        device = self._model.device
        total = 0.0
        for micro, chosen in batch.micro_batches(self._settings.trainer.micro_batch_size):
            reference = micro.reference_logprobs
            with self._model.spmd():
                loss, figures = policy_loss(
                    LossInputs(
                        log_distribution=log_distributions(
                            self._model, micro, temperature=self._settings.temperature
                        ),
                        targets=torch.from_numpy(micro.target).to(device),
                        old_logprobs=torch.from_numpy(micro.old_logprobs).to(device),
                        advantages=torch.from_numpy(micro.advantages).to(device),
                        weights=torch.from_numpy(weights[chosen]).to(device),
                        reference_logprobs=None
                        if reference is None
                        else torch.from_numpy(reference).to(device),
                    ),
                    loss_settings,
                )
                loss.backward()  # type: ignore[no-untyped-call]
            accumulator.add(figures, fresh=fresh)
            total += float(loss.detach())
        return total

    def _update(self, loss: float) -> float:
        norm = titan_dist.clip_grad_norm_(
            list(self._model.module.parameters()), self._settings.trainer.max_grad_norm, foreach=True
        )
        norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise NonFiniteLoss(
                f"expected a finite loss and gradient in iteration {self.version}, got loss {loss} and "
                f"gradient norm {norm}; a lower trainer.learning_rate is the usual cure"
            )
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return norm

    def save(self, *, last: bool) -> None:
        """Write a checkpoint, if one is due at this version or this is the last."""
        self._checkpoints.save(self.version, last_step=last)

    def hf_state_dict(self) -> dict[str, Tensor]:
        """The weights under their Hugging Face names; they share the model's storage."""
        return self._model.hf_state_dict()

    def export(self, folder: str | Path) -> None:
        """Write the weights as safetensors, apart from checkpoints, which keep the optimizer too."""
        from safetensors.torch import save_file

        state = {name: tensor.cpu().contiguous() for name, tensor in self.hf_state_dict().items()}
        save_file(state, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})

    def close(self) -> None:
        """Wait for what is being written, and end TorchTitan's threads."""
        self._checkpoints.close()

    # What a checkpoint holds beside model, optimizer and schedule (torch.distributed.checkpoint.stateful).

    def state_dict(self) -> dict[str, Any]:
        """The version, and the state of the generators of random numbers."""
        return {
            "version": self.version,
            "torch_rng": torch.get_rng_state(),
            "shuffle": self._shuffle.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.version = int(state["version"])
        torch.set_rng_state(state["torch_rng"])
        self._shuffle.bit_generator.state = state["shuffle"]
