"""One rank of the trainer: a TorchTitan model with its optimizer, schedule, clipping and checkpoints."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.devices import own_device
from rl_bridge.errors import (
    BridgeError,
    ModelError,
    NonFiniteLossError,
    TrainerWentBackError,
    TrainingError,
)
from rl_bridge.titan.lora import checkpoint_identity
from rl_bridge.titan.model import TitanModel
from rl_bridge.titan.ranks import (
    SINGLE_RANK,
    PartScatter,
    Rank,
    convert_rank_errors,
    join_process_group,
    limit_waits,
)
from rl_bridge.trainer.checkpoints import SHARD_BYTES, Checkpoints, export_adapter, export_weights
from rl_bridge.trainer.critic import Critic
from rl_bridge.trainer.metrics import LossMetrics, StepMeter
from rl_bridge.trainer.optimization import Optimization
from rl_bridge.trainer.passes import RankBatch, rank_batches
from rl_bridge.trainer.policy import PolicyGradients, loss_settings, with_advantages
from rl_bridge.trainer.profile import trace_step
from rl_bridge.trainer.settings import ResumeState, TrainerSettings
from rl_bridge.trainer.weights import Offload, Readers
from rl_bridge.types import PolicyVersion
from rl_bridge.weights.snapshot import State

_ADAPTERS = "adapters"
_NO_ADAPTERS = "whole weights"


class Trainer:
    """Trains a model on batches.

    Every rank has one, and each method is called on all ranks with the same arguments.

    Attributes:
        version: The number of iterations trained so far, which is the version of the weights.
        measured: The last step's throughput and memory, by `StepMeter`; unlike its metrics they vary between runs.
        checkpointing: The kind of activation checkpointing, with the reason of the choice if it was `auto`.

    Raises:
        ConfigError: The model cannot be divided over the ranks as configured.
        ModelError: The model cannot be loaded.
        RankLostError: The other ranks did not join. Every method that needs them raises it.
    """

    def __init__(self, settings: TrainerSettings, rank: Rank = SINGLE_RANK) -> None:
        torch.set_num_threads(settings.config.trainer.num_threads)
        if settings.config.deterministic:  # cuBLAS reads this variable once
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(settings.config.deterministic)
        torch.manual_seed(settings.config.seed + rank.index)
        device = own_device()
        join_process_group(device, rank)
        self._rank = rank
        settings, self.checkpointing = settings.resolve_checkpointing(_find_smallest_gpu_bytes(device))
        self._settings, config = settings, settings.config.trainer
        with convert_rank_errors("while the model was loaded"):
            self._model = TitanModel(
                settings.model_path,
                dtype=settings.config.model.dtype,
                max_length=settings.config.rollout.max_length,
                trainable=True,
                device=device,
                parallel=config.parallel,
                chunk=config.tokens_per_chunk,
                activation_checkpointing=config.activation_checkpointing,
                compile=config.compile,
                lora=settings.config.model.lora,
                seed=settings.config.seed,
                options=config.options,
            )
            self._critic = Critic(settings) if settings.config.algorithm.advantage == "gae" else None
        limit_waits(rank.timeout_s)
        self._optimizer = Optimization(self._model, config, learning_rate=config.learning_rate)
        self.version: PolicyVersion = 0
        self._checkpoints = Checkpoints(settings.folder, timeout_s=config.timeout_s)
        self._parts = PartScatter(config.parallel.tp, timeout_s=config.timeout_s)
        self._readers = Readers()
        self._policy = PolicyGradients(self._model, settings)
        self._offload = Offload()
        self._adapter_id = None if settings.config.model.lora is None else _make_adapter_id(settings)
        self._meter = StepMeter(device)
        self.measured: dict[str, float] = {}

    def resume(self) -> ResumeState:
        """Load the newest readable checkpoint in the run's folder; returns the state that was stored with it.

        It may have been written by another number of ranks, and on other devices.

        Raises:
            ModelError: All are damaged, or the newest of the others has adapters where this run trains whole weights,
                whole weights where it trains adapters, or adapters that do not match this run's.
        """
        with convert_rank_errors("while the checkpoint was loaded"):
            self._checkpoints.sweep()
            checkpoint, damaged = self._checkpoints.newest(self._read)
        if checkpoint is None:
            return ResumeState()
        state, resumed = checkpoint
        self._model.load_trained(state["model"])
        self._optimizer.reapply_config(resumed.version)
        if self._critic is not None:
            self._critic.restore(state, resumed.version)
        for device, random_state in state.get(self._random_key, {}).items():
            (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(random_state)
        self.version = resumed.version
        return replace(resumed, damaged=damaged)

    def _read(self, version: PolicyVersion) -> tuple[dict[str, Any], ResumeState]:
        """Read a checkpoint, weights and moments in place; also returns the controller's state."""
        resumed = self._checkpoints.run_state(version)
        state = self._state()
        saved_id = next(iter(self._checkpoints.names_below(_ADAPTERS, version)), None)
        if saved_id != self._adapter_id:
            raise ModelError(
                f"cannot resume from the checkpoint of version {version}: expected {self._adapter_id or _NO_ADAPTERS}, "
                f"got {saved_id or _NO_ADAPTERS}; use the model.path and model.lora that the run was started with"
            )
        # Random generators that the checkpoint lacks, of further ranks or another device type, keep their seeds.
        generators = state.pop(self._random_key)
        available = self._checkpoints.names_below(self._random_key, version)
        if saved_generators := {device: generators[device] for device in generators if device in available}:
            state[self._random_key] = saved_generators
        self._checkpoints.load(version, state)
        return state, resumed

    def step(self, batch: TrainBatch | RankBatch, version: PolicyVersion | None = None) -> dict[str, float]:
        """Train one iteration on a batch.

        Args:
            batch: This rank's part, or all loss tokens, of which it takes its part. It must have reference
                log-probabilities if `kl_coef` is above 0 and all weights are trained. Anything else that the algorithm
                needs is added here.
            version: The version that the trainer must be at; None for any.

        Returns:
            The metrics of the iteration by their names in the log, the same on every rank.

        Raises:
            CheckpointError: The checkpoint in progress could not be written. Nothing was trained.
            NonFiniteLossError: The loss or the gradient is not finite. That update was not applied.
            TrainerWentBackError: The trainer is at another version; nothing was trained.
            TrainingError: The GPU has not enough memory, and there is no other rank.
        """
        if version is not None:
            self._require_version(version)
        with convert_rank_errors(f"in iteration {self.version}"):
            self._checkpoints.check()
            try:
                with trace_step(self._settings, self._rank.index, self.version):
                    return self._step(self._take_own_part(batch))
            except torch.OutOfMemoryError as error:
                if self._rank.count > 1:  # all ranks are restarted: other processes may have used the memory
                    raise
                raise TrainingError(
                    f"the GPU's memory is too small for a pass with trainer.activation_checkpointing "
                    f"{self.checkpointing}; resume with full, or with a smaller trainer.tokens_per_pass: {error}"
                ) from error

    def divide(self, batch: TrainBatch) -> list[RankBatch]:
        """Divide an iteration's loss tokens, on the first rank alone: a part for each rank that shares the data."""
        parts = rank_batches(batch, self._settings, version=self.version, ranks=self._rank.count)
        return parts[:: self._settings.config.trainer.parallel.tp]

    def receive(self, parts: Sequence[RankBatch] | BridgeError | None) -> RankBatch:
        """Return this rank's part of what the first rank has divided; see `PartScatter`."""
        with convert_rank_errors(f"for the batch of iteration {self.version}"):
            return self._parts(parts)

    def _take_own_part(self, batch: TrainBatch | RankBatch) -> RankBatch:
        if isinstance(batch, RankBatch):
            return batch
        parts = rank_batches(batch, self._settings, version=self.version, ranks=self._rank.count)
        return parts[self._rank.index]

    def _step(self, rank_batch: RankBatch) -> dict[str, float]:
        config, algorithm = self._settings.config.trainer, self._settings.config.algorithm
        passes = [model.passes for model in (self._policy, self._critic) if model is not None]
        for model_passes in passes:
            model_passes.begin()
        self._meter.begin()
        loss = loss_settings(algorithm, progress=self.version / config.iterations)
        metrics = LossMetrics()
        losses: list[float] = []
        norms: list[float] = []
        blocked_s = 0.0
        learning_rate = self._optimizer.learning_rate
        rank_batch, rejection = self._policy.reject_sequences(self._prepare(rank_batch))
        for update in range(len(rank_batch.updates)):
            # Tokens sampled by the current weights; after the first update there are none.
            fresh = None if update else self.version
            losses.append(self._policy.accumulate(rank_batch, update, loss, metrics, fresh=fresh))
            norms.append(self._clip_gradients(rank_batch, update, losses[-1]))
            blocked_s += self._readers.wait_until_none(config.collective_timeout_s)
            for learner in self._learners:
                learner.step()
        for _ in range(len(losses), config.updates_per_iteration):
            for learner in self._learners:
                learner.skip()  # there were too few trajectories for every update; the schedule counts iterations
        self.version += 1
        work_done = [self._policy.passes.tokens, sum(model_passes_done.flops for model_passes_done in passes)]
        tokens, flops = self._model.sum_over_data(torch.tensor(work_done, dtype=torch.float64)).tolist()
        step_metrics = {
            "loss/total": sum(losses) / len(losses),
            "train/grad_norm": sum(norms) / len(norms),
            "train/learning_rate": learning_rate,
            "train/entropy_coef": loss.entropy_coef,
            "time/push_blocked_s": blocked_s,
            **rejection,
            **metrics.reduce(self._model.sum_over_data, self._model.max_over_data),
            **({} if self._critic is None else self._critic.metrics(rank_batch.batch)),
        }
        self.measured = self._meter.metrics(tokens=tokens, flops=flops)
        return step_metrics

    @property
    def _learners(self) -> list[Optimization]:
        return [self._optimizer] if self._critic is None else [self._optimizer, self._critic.optimization]

    def _prepare(self, rank_batch: RankBatch) -> RankBatch:
        """Add what is computed before the first update: values, advantages and log-probabilities.

        With LoRA the reference log-probabilities are the model's own with its adapters off.
        """
        batch, algorithm = rank_batch.batch, self._settings.config.algorithm
        if algorithm.kl_coef and self._settings.config.model.lora is not None:
            with self._model.without_adapters():
                batch = batch.with_reference(self._policy.logprobs(rank_batch))
        values = None if self._critic is None else self._critic.values(rank_batch)
        batch = with_advantages(
            batch,
            algorithm,
            values=values,
            gather_values=lambda values_of_rank: self._policy.passes.gather_values(batch, values_of_rank),
        )
        return self._policy.with_proximal(replace(rank_batch, batch=batch))

    def _clip_gradients(self, rank_batch: RankBatch, update: int, loss: float) -> float:
        """Clip the policy's gradient, then accumulate and clip the critic's; if one is not finite, none is applied."""
        try:
            label = f"algorithm.loss={self._settings.config.algorithm.loss}"
            norm = self._optimizer.clip(loss, iteration=self.version, label=label)
            if self._critic is not None:
                self._critic.accumulate(rank_batch, update, iteration=self.version)
        except NonFiniteLossError:
            self._optimizer.drop()
            raise
        return norm

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return each loss token's log-probability under the current weights, shape [T]; the same on every rank."""
        with convert_rank_errors(f"for what iteration {self.version} has come to"):
            rank_batch = self._take_own_part(batch)
            return self._policy.passes.gather_values(
                rank_batch.batch, self._policy.logprobs(rank_batch)
            ).astype(np.float32)

    @contextmanager
    def weights(self, version: PolicyVersion) -> Iterator[State]:
        """Return this rank's part of the weights for generators, as DTensors that any thread may read.

        These are the weights under their Hugging Face names with adapters merged or, with `model.lora.push` of
        "adapter", the adapters alone under PEFT's names. Within the block they do not change: the next update waits for
        its end, but forward and backward passes do not.
        """
        self._require_version(version)
        with self._readers:
            lora = self._settings.config.model.lora
            adapters_only = lora is not None and lora.push == "adapter"
            yield self._model.adapter_state() if adapters_only else self._model.sharded_state_dict()

    def save(
        self,
        version: PolicyVersion,
        run_state: Mapping[str, Any] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint.

        Args:
            version: The version that the trainer must be at, to which the other arguments belong.
            run_state: The controller's state, returned on resumption, as a JSON object.
            attachments: Larger parts of that state, by file name.
            wait: Wait until it is written. Otherwise it is written from a copy in the host's memory while training
                goes on; the next step or the next checkpoint raises if that fails.

        Raises:
            CheckpointError: It could not be written, or the previous one; older ones are complete.
            TrainerWentBackError: The trainer is at another version.
        """
        self._require_version(version)
        with convert_rank_errors(f"for the checkpoint of version {self.version}"):
            self._checkpoints.save(self.version, self._state(), run_state or {}, attachments or {})
            if wait:
                self._checkpoints.finish()

    def wait_for_checkpoint(self) -> None:
        """Wait on any thread, during any other work, until the checkpoint in progress is written or has failed."""
        self._checkpoints.wait()

    def offload(self) -> None:
        """Move weights and moments to the host's memory until `onload`, to free the device's."""
        self._readers.wait_until_none(self._settings.config.trainer.collective_timeout_s)
        self._offload.release(tensor for learner in self._learners for tensor in learner.tensors())

    def onload(self) -> None:
        """Move weights and moments back to the device; does nothing if they are there."""
        self._offload.restore()

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights under their Hugging Face names, on every rank."""
        return self._model.hf_state_dict()

    def export(
        self, folder: str | Path, version: PolicyVersion | None = None, *, max_file_bytes: int = SHARD_BYTES
    ) -> None:
        """Write the weights as safetensors, in the dtype that the model computes in; checkpoints are more precise.

        Adapters are merged, and also written separately to the subfolder `adapter`, as PEFT stores them. Files have at
        most `max_file_bytes`; if there are several, an index maps tensors to files.
        """
        if version is not None:
            self._require_version(version)
        with convert_rank_errors("for the export"):
            self._checkpoints.finish()
            group, folder = self._checkpoints.group, Path(folder)
            dtype: torch.dtype = getattr(torch, self._settings.config.model.dtype)
            state = self._model.sharded_state_dict()
            export_weights(state, folder, dtype=dtype, group=group, max_file_bytes=max_file_bytes)
            if (lora := self._settings.config.model.lora) is not None:
                factors, base = self._model.adapter_state(), self._settings.model_path
                export_adapter(factors, folder / "adapter", lora, base=base, group=group)

    def close(self) -> None:
        """Wait for the checkpoint in progress, and leave the process group if it has other ranks."""
        self._checkpoints.close()
        if self._rank.count > 1:
            dist.destroy_process_group()

    def _require_version(self, version: PolicyVersion) -> None:
        if version != self.version:
            raise TrainerWentBackError(
                f"expected version {self.version}, which the trainer is at, got {version}; "
                "the caller has missed its last step, or its return to a checkpoint"
            )

    def _state(self) -> dict[str, Any]:
        """Return the training state of a checkpoint; it is read in place when one is loaded."""
        return {
            "model": self._model.trained_state(),
            **({} if self._adapter_id is None else {_ADAPTERS: {self._adapter_id: torch.zeros(1)}}),
            **self._optimizer.state(),
            **({} if self._critic is None else self._critic.state()),
            self._random_key: self._get_random_states(),
        }

    @property
    def _random_key(self) -> str:
        return f"random-{self._rank.index}"

    def _get_random_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._model.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return states


def _find_smallest_gpu_bytes(device: torch.device) -> int | None:
    """Return the memory of the smallest GPU of all ranks, in bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    gpu_bytes = torch.tensor(torch.cuda.get_device_properties(device).total_memory)
    if dist.get_world_size() > 1:
        dist.all_reduce(gpu_bytes, op=dist.ReduceOp.MIN)
    return int(gpu_bytes)


def _make_adapter_id(settings: TrainerSettings) -> str:
    """Return a text that identifies adapters and their base: others might fit in shape, but are another policy."""
    lora = settings.config.model.lora
    assert lora is not None
    base, targets = checkpoint_identity(Path(settings.model_path)), " ".join(sorted(lora.targets))
    return (
        f"adapters of rank {lora.rank} and alpha {lora.alpha:g} for {targets} of the checkpoint {base[:16]}"
    )
