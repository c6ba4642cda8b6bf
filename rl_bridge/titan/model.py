"""A TorchTitan model from a checkpoint in the Hugging Face layout, on a GPU or a CPU."""

import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rl_bridge.buffer.batch import PackedRows, TrainBatch
from rl_bridge.config import LoraConfig, ParallelConfig, TrainerOptions
from rl_bridge.errors import ConfigError, ModelError
from rl_bridge.titan.architecture import read_architecture, require_layout
from rl_bridge.titan.definitions import (
    DEFINITIONS,
    VALUE_HEAD,
    CheckpointNames,
    model_config,
    shard_last_layer,
)
from rl_bridge.titan.layers import BlockMask, LossTokens, TokenOutputs, document_mask
from rl_bridge.titan.lora import Adapters, with_adapters
from rl_bridge.titan.ranks import agree, gather_state, join_process_group
from rl_bridge.weights.snapshot import Box, State, local_shards

# After rl_bridge.titan.layers, which prepares TorchTitan for machines without an accelerator.
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig  # isort: skip
from torchtitan.distributed import ParallelDims  # isort: skip
from torchtitan.distributed import utils as titan_dist  # isort: skip
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip
from torchtitan.tools.utils import set_default_dtype  # isort: skip

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
ROWS_PER_COMPARISON = 4096
"""Rows of the two tensors that are compared at once: whole they would take gigabytes beside the model."""
DEFAULT_CHUNK = 1024
"""Loss tokens whose logits are in memory at once: 0.6 GB with a vocabulary of 150,000."""
COMPILED_MULTIPLE = 64
"""Rows of a compiled model are padded to a multiple of this many tokens, so that torch compiles at most twice: for the
first length, and for varying lengths."""
MASK_ALIGNMENT = 8
"""Numbers to whose multiples torch's memory-efficient attention pads the rows of a mask."""
_CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


NO_OPTIONS = TrainerOptions()
FSDP = ParallelConfig()
"""All ranks have batches of their own and share the weights."""


def _make_titan_config(kind: type[Any], options: Mapping[str, Any], section: str, **decided: Any) -> Any:
    """Make one of TorchTitan's configurations from `trainer.options` and what the run decides by other keys."""
    free = {field.name for field in fields(kind)} - decided.keys()
    if unknown := sorted(options.keys() - free):
        raise ConfigError(
            f"expected trainer.options.{section} to be fields of {kind.__name__} that no other key decides, "
            f"{', '.join(sorted(free))}, got {', '.join(unknown)}"
        )
    return kind(**decided, **options)


class TitanModel:
    """A policy, a reference or a critic with weights from a folder in the Hugging Face layout.

    A critic is a policy's body with one number per token in place of logits: the expected return. If the checkpoint is
    a reward model, its last layer starts with that model's (`score.weight`, as transformers writes models for
    classification with one label), otherwise with zeros, so that every value is 0 until it is trained.

    Args:
        path: The folder, with config.json and safetensors in one file or several.
        dtype: The dtype of the forward pass. Parameters are kept in float32.
        max_length: The length of the longest row, in tokens.
        trainable: Whether gradients are computed.
        device: The device on which it computes.
        parallel: How the ranks of the process group, which is created with one rank if there is none, share the model.
        value_head: Whether it is a critic.
        activation_checkpointing: As `trainer.activation_checkpointing`.
        compile: Whether blocks are compiled by torch.compile. Each pass is then one row, because other shapes would
            exceed torch's limit of recompilations.
        chunk: The number of loss tokens whose logits are in memory at once.
        lora: Trains only adapters and a value head; None trains all weights.
        seed: The seed of the adapters' initial values.
        options: `trainer.options`.

    Attributes:
        module: The TorchTitan module.
        adapter: Translates state dicts to the Hugging Face names and back.
        parallel_dims: TorchTitan's description of the ranks.

    Raises:
        ConfigError: The ranks cannot be divided as configured, rows are longer than the model supports, or there is no
            compiler.
        ModelError: The folder holds no checkpoint, or one of an architecture that is not supported.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str,
        max_length: int,
        trainable: bool,
        device: torch.device,
        parallel: ParallelConfig = FSDP,
        value_head: bool = False,
        activation_checkpointing: str = "none",
        compile: bool = False,  # noqa: A002 - the key's name
        chunk: int = DEFAULT_CHUNK,
        lora: LoraConfig | None = None,
        seed: int = 0,
        options: TrainerOptions = NO_OPTIONS,
    ) -> None:
        self.device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._chunk = chunk
        if compile:
            _require_compiler()
        join_process_group(device)
        architecture = read_architecture(Path(path))
        require_layout(architecture, parallel, dist.get_world_size(), lora)
        parallelism = _make_titan_config(
            ParallelismConfig,
            options.parallelism,
            "parallelism",
            spmd_backend="partial_dtensor",
            data_parallel_replicate_degree=parallel.hsdp,
            data_parallel_shard_degree=parallel.fsdp or -1,
            tensor_parallel_degree=parallel.tp,
            expert_parallel_degree=parallel.ep,
            context_parallel_degree=parallel.cp,
            pipeline_parallel_degree=parallel.pp,
        )
        training = _make_titan_config(
            TrainingConfig,
            options.training,
            "training",
            seq_len=max_length,
            mixed_precision_param=dtype,
            dtype="float32",
        )
        # Between the matrices, activations are sharded along the row.
        self._row_multiple = math.lcm(parallel.tp, COMPILED_MULTIPLE if compile else 1)
        self.parallel_dims = _share_meshes(ParallelDims.from_config(parallelism, dist.get_world_size()))
        titan_dist.set_spmd_backend(parallelism.spmd_backend)
        self._context = titan_dist.get_spmd_context(parallel_dims=self.parallel_dims)
        self._architecture, self._value_head = architecture, value_head
        if max_length > architecture.positions:
            raise ConfigError(
                f"expected rows of at most {architecture.positions} tokens, which the model at {str(path)!r} was made "
                f"for, got {max_length}; lower rollout.max_length"
            )
        padded = -(-max_length // self._row_multiple) * self._row_multiple
        # TorchTitan's kernel for attention within documents does not support float32.
        self._uses_varlen_kernel = device.type == "cuda" and dtype == "bfloat16"
        self._in_one_row = self._uses_varlen_kernel or compile
        config = model_config(
            architecture, max_length=padded, value_head=value_head, in_one_row=self._uses_varlen_kernel
        )
        config.update_from_config(
            config=SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
        )
        shard_last_layer(config, value_head=value_head)
        if lora is not None:
            config = with_adapters(config, lora)
        with torch.device("meta"), set_default_dtype(torch.float32):
            module = config.build()
        if lora is None:
            module.requires_grad_(trainable)
        elif value_head:
            module.lm_head.requires_grad_(True)
        with tempfile.TemporaryDirectory() as scratch:  # a required folder for dumps that are not enabled
            module = DEFINITIONS[architecture.family].parallelize(
                module,
                parallel_dims=self.parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=CompileConfig(enable=compile, components=["model"]),
                ac_config=_CHECKPOINTING[activation_checkpointing],
                dump_folder=scratch,
            )
        self.adapter = CheckpointNames(config, value_head=value_head)
        self._adapters = None if lora is None else Adapters(module, lora, self.adapter, seed=seed)
        self.module = _materialize(module, device).train(trainable)
        self._load(Path(path), tied=config.enable_weight_tying)

    def _load(self, path: Path, *, tied: bool) -> None:
        failure, is_untied = None, False
        try:
            _read_weights(path, self.adapter.to_hf(self.module.state_dict()))
            is_untied = tied and _has_untied_output_layer(path)
        except Exception as error:
            failure = str(error) or type(error).__name__
        if (failure := agree(failure)) is not None:  # the ranks may see different files
            raise ModelError(f"cannot load the weights at {str(path)!r}: {failure}")
        if is_untied:
            raise ModelError(
                f"expected {OUTPUT} to be {EMBEDDING}, since config.json at {str(path)!r} has tie_word_embeddings, "
                "got another one: generators would use it, the trainer would not. If it was trained by itself, set "
                "tie_word_embeddings to false; otherwise take it out of the safetensors"
            )

    def spmd(self) -> AbstractContextManager[Any]:
        """Return the context in which forward and backward passes must run."""
        context: AbstractContextManager[Any] = self._context()
        return context

    def pack(self, batch: TrainBatch) -> PackedRows:
        """Lay a batch's contexts out for one pass through this model."""
        return batch.pack_rows(in_one_row=self._in_one_row, multiple_of=self._row_multiple)

    def train_flops(self, batch: TrainBatch) -> float:
        """Return the floating-point operations of a forward and backward pass; see `Architecture.train_flops`."""
        return self._architecture.train_flops(
            batch.lengths.tolist(),
            len(batch),
            computed=batch.computed.tolist(),
            output_layer=not self._value_head,
            frozen=self._adapters is not None,
        )

    def outputs(
        self, rows: PackedRows, *, temperature: float = 1.0, entropy_top_k: int | None = None
    ) -> TokenOutputs:
        """Return the last layer's outputs for each loss token in rows from `pack`; call it within `spmd`.

        Logits are divided by the sampling temperature, so that the distribution is the engine's. For `entropy_top_k`
        see `token_logprobs`.
        """
        if rows.target.min() < 0 or rows.target.max() >= self._architecture.vocabulary:
            raise ValueError(
                f"a loss token is not in the vocabulary of {self._architecture.vocabulary}: they are from "
                f"{rows.target.min()} to {rows.target.max()}"
            )
        self.module.lm_head.loss_tokens = LossTokens(
            row=self._to_tensor(rows.row),
            column=self._to_tensor(rows.column),
            target=self._to_tensor(rows.target),
            temperature=temperature,
            chunk=self._chunk,
            entropy_top_k=None
            if entropy_top_k is None
            else min(entropy_top_k, self._architecture.vocabulary),
        )
        masks: Any = None
        positions = self._to_tensor(rows.positions)
        if rows.blocks is not None:
            hidden = ~self._to_tensor(rows.blocks.visible).unsqueeze(1)
            # Of a boolean mask every layer would keep a copy of its own, as numbers; on GPUs also of one whose rows do
            # not begin at multiples of `MASK_ALIGNMENT`.
            *shape, keys = hidden.shape
            padded = -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
            bias = torch.zeros((*shape, padded), dtype=self._dtype, device=self.device)[..., :keys]
            masks = BlockMask(self._to_tensor(rows.blocks.columns), bias.masked_fill_(hidden, -math.inf))
        elif self._uses_varlen_kernel:
            masks = self.module.get_attention_masks(positions)
        elif self._in_one_row or not rows.one_a_row:
            masks = document_mask(self._to_tensor(rows.document))
        outputs: TokenOutputs = self.module(
            self._to_tensor(rows.tokens), positions=positions, attention_masks=masks
        )
        return outputs

    def idle(self) -> Tensor:
        """Return a loss of 0, whose computation takes part in collectives without a share of the batch."""
        zeros, row = np.zeros(1, dtype=np.int64), np.zeros((1, self._row_multiple), dtype=np.int64)
        rows = PackedRows(
            tokens=row,
            positions=np.arange(self._row_multiple).reshape(1, -1),
            document=row,
            row=zeros,
            column=zeros,
            target=zeros,
            one_a_row=True,
        )
        return self.outputs(rows).logprobs.sum() * 0.0

    def _to_tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over the data-parallel ranks."""
        return self._reduce_over_data(values, dist.ReduceOp.SUM)

    def max_over_data(self, values: Tensor) -> Tensor:
        """Return the maximum of a CPU tensor over the data-parallel ranks."""
        return self._reduce_over_data(values, dist.ReduceOp.MAX)

    def _reduce_over_data(self, values: Tensor, operation: Any) -> Tensor:
        if (mesh := self.parallel_dims.get_optional_mesh("batch")) is not None:
            values = values.to(self.device)
            dist.all_reduce(values, op=operation, group=mesh.get_group())
        return values.cpu()

    def trained_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained weights, as DTensors under TorchTitan's names, sharing storage."""
        trained_names = {
            name.replace("_checkpoint_wrapped_module.", "")
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        return {name: value for name, value in self.module.state_dict().items() if name in trained_names}

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """Load trained weights, in the form of `trained_state`, from a checkpoint."""
        self.module.load_state_dict({**self.module.state_dict(), **state})

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the adapters are disabled, so that the model is the initial one."""
        assert self._adapters is not None
        return self._adapters.disable()

    def adapter_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the adapters, as DTensors under PEFT's names that share the model's storage."""
        assert self._adapters is not None
        return self._adapters.state()

    def sharded_state_dict(self) -> State:
        """Return this rank's part of the weights, as DTensors under their Hugging Face names.

        They share the model's storage, so an update changes them. Weights with an adapter are lazy sums with it, for
        which the adapters are gathered: then all ranks have to call this.
        """
        state = self.adapter.to_hf(self.module.state_dict())
        return state if self._adapters is None else self._adapters.merge(state)

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights under their Hugging Face names, detached, with adapters merged.

        All ranks have to call this. The weights are in the host's memory; with a single rank on a CPU, those without an
        adapter share the model's storage. They are gathered one by one, so no GPU needs room for the whole model.
        """
        return gather_state(self.sharded_state_dict())


_dims_by_world: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], ParallelDims]] = (
    WeakKeyDictionary()
)


def _share_meshes(dims: ParallelDims) -> ParallelDims:
    """Return the description of the same layout that an earlier model of this process has, with its meshes, if any.

    Meshes of its own would cost a critic, or a further model, a process group for each: memory of the GPU for NCCL's,
    and of gloo's a thread that wakes up about 100 times a second.
    """
    assert dist.group.WORLD is not None
    layout = (
        dims.dp_replicate,
        dims.dp_shard,
        dims.cp,
        dims.tp,
        dims.pp,
        dims.ep,
        dims.spmd_backend,
    )
    return _dims_by_world.setdefault(dist.group.WORLD, {}).setdefault(layout, dims)


def _read_weights(path: Path, state: State) -> None:
    """Read this rank's parts of a state from safetensors, in place; ValueError if one is missing.

    Adapters are in no checkpoint, and a value head is in those of reward models alone: they keep their initial values.
    """
    missing = local_shards(state)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in missing.keys() & set(weights.keys()):
                shard, stored = missing.pop(name), weights.get_slice(name)
                if (shape := tuple(stored.get_shape())) != shard.full_shape:
                    raise ValueError(f"expected {name} of shape {shard.full_shape}, got {shape}")
                shard.local.copy_(stored[shard.box.index_in(Box.of_shape(shape))])
    if names := sorted(missing.keys() - {VALUE_HEAD}):
        raise ValueError(f"expected {', '.join(names)} in its safetensors, which lack them")


def _materialize(module: Any, device: torch.device) -> Any:
    """Allocate the module's memory, whose parameters are then loaded from the checkpoint."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):  # gloo has no averaging reduction
            submodule.set_force_sum_reduction_for_comms(True)
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_states(buffer_device=None)
    return module


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"trainer.compile needs a C++ compiler on {os.uname().nodename}, there is none: {error}; "
            "install g++ there, or leave trainer.compile out"
        ) from error


def _has_untied_output_layer(path: Path) -> bool:
    """Whether the files hold an output layer that differs from the embedding.

    Engines compare the two and follow the files; TorchTitan follows config.json and ignores the output layer.
    """
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights = files.enter_context(safe_open(file, framework="pt"))
            names = set(weights.keys()) & {EMBEDDING, OUTPUT}
            tensors |= {name: weights.get_slice(name) for name in names}
        if OUTPUT not in tensors:
            return False
        embedding, output = tensors[EMBEDDING], tensors[OUTPUT]
        if embedding.get_shape() != output.get_shape():
            return True
        parts = (
            slice(start, start + ROWS_PER_COMPARISON)
            for start in range(0, embedding.get_shape()[0], ROWS_PER_COMPARISON)
        )
        return not all(torch.equal(embedding[rows].float(), output[rows].float()) for rows in parts)
