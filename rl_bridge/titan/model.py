"""A TorchTitan model from a checkpoint in the Hugging Face layout, on a GPU or a CPU."""

import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.fsdp import FSDPModule

from rl_bridge.buffer.batch import PackedRows
from rl_bridge.errors import ConfigError, ModelError
from rl_bridge.titan.architecture import read_architecture
from rl_bridge.titan.attention import document_mask
from rl_bridge.titan.definitions import DEFINITIONS, VALUE_HEAD, CheckpointNames, keep_whole, model_config
from rl_bridge.titan.ranks import is_of_siblings, join_process_group
from rl_bridge.titan.tying import EMBEDDING, OUTPUT, has_another_output_layer

# After rl_bridge.titan.devices, which tells TorchTitan about machines without an accelerator.
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig  # isort: skip
from torchtitan.distributed import ParallelDims  # isort: skip
from torchtitan.distributed import utils as titan_dist  # isort: skip
from torchtitan.distributed.activation_checkpoint import FullAC  # isort: skip
from torchtitan.tools.utils import set_default_dtype  # isort: skip

__all__ = ["ONE_RANK", "Parallelism", "TitanDecoder", "TitanModel"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Parallelism:
    """How one model is spread over the ranks of the process group.

    Attributes:
        tensor: Ranks that share every matrix; the rest of the group is data parallel, with sharded weights (FSDP2).
        pipeline: Ranks that share the layers; only 1 is supported.
    """

    tensor: int = 1
    pipeline: int = 1


ONE_RANK = Parallelism()


class TitanDecoder:
    """What a policy and a critic have in common: a model whose weights came from a folder in the Hugging Face layout.

    Args:
        path: The folder: config.json and safetensors, in one file or several.
        dtype: What the forward pass computes in. Parameters are kept in float32.
        max_length: The longest row, in tokens.
        trainable: False keeps no gradients.
        device: Where it computes.
        spread: Over the process group, which has one rank where nobody made one before.
        outputs: As for `model_config`.
        recompute: Whether the backward pass computes each block's activations anew in place of keeping them: a third
            more of computation for memory that hardly grows with the layers. None does so on a GPU.

    Attributes:
        module: The TorchTitan module.
        adapter: Translates state dicts to the Hugging Face names and back.
        parallel_dims: TorchTitan's description of the ranks.
        row_multiple: Rows have a length that is a multiple of this.

    Raises:
        ConfigError: The ranks cannot be divided as asked, or the rows are longer than the model was made for.
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
        spread: Parallelism = ONE_RANK,
        outputs: int | None = None,
        recompute: bool | None = None,
    ) -> None:
        self.device = device
        join_process_group(device)
        _check(spread, dist.get_world_size())
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=spread.tensor)
        training = TrainingConfig(seq_len=max_length, mixed_precision_param=dtype, dtype="float32")
        self.row_multiple = spread.tensor  # what lies between the matrices is split along the row
        self.parallel_dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        titan_dist.set_spmd_backend(parallelism.spmd_backend)
        self._context = titan_dist.get_spmd_context(parallel_dims=self.parallel_dims)
        architecture = read_architecture(Path(path))
        if max_length > architecture.positions:
            raise ConfigError(
                f"expected rows of at most {architecture.positions} tokens, which the model at {str(path)!r} was made "
                f"for, got {max_length}; lower rollout.max_length"
            )
        padded = -(-max_length // self.row_multiple) * self.row_multiple
        config = model_config(architecture, max_length=padded, outputs=outputs)
        try:
            config.update_from_config(
                config=SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
            )
        except ValueError as error:  # attention heads that cannot be divided
            raise ConfigError(f"this model cannot be spread as asked: {error}") from error
        if outputs is not None:
            keep_whole(config.lm_head)
        with torch.device("meta"), set_default_dtype(torch.float32):
            module = config.build()
        recompute = trainable and device.type == "cuda" if recompute is None else recompute
        with tempfile.TemporaryDirectory() as scratch:  # it wants a folder for dumps that are never asked for
            module = DEFINITIONS[architecture.family].parallelize(
                module,
                parallel_dims=self.parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=CompileConfig(enable=False),
                ac_config=FullAC.Config() if recompute else None,
                dump_folder=scratch,
            )
        self.module = _filled(module, device).train(trainable).requires_grad_(trainable)
        self.adapter = CheckpointNames(config, Path(path), value_head=outputs is not None)
        self._load(Path(path), tied=config.enable_weight_tying)

    def _load(self, path: Path, *, tied: bool) -> None:
        state = self.adapter.to_hf(self.module.state_dict())
        try:
            reader = HuggingFaceStorageReader(path=str(path))
            there = reader.read_metadata().state_dict_metadata
            # A policy's checkpoint has no value head: that stays as it was initialised.
            stored = {name: value for name, value in state.items() if name != VALUE_HEAD or name in there}
            load_checkpoint(stored, storage_reader=reader)
            misdescribed = tied and has_another_output_layer(path)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if is_of_siblings(error):
                raise
            raise ModelError(f"cannot load the weights at {str(path)!r}: {error}") from error
        if misdescribed:
            raise ModelError(
                f"expected {OUTPUT} to be {EMBEDDING}, since config.json at {str(path)!r} has tie_word_embeddings, "
                "got another one: generators would use it, the trainer would not. If it was trained by itself, set "
                "tie_word_embeddings to false; otherwise take it out of the safetensors"
            )
        self.module.load_state_dict(self.adapter.from_hf({**state, **stored}))

    def spmd(self) -> AbstractContextManager[Any]:
        """The context in which forward and backward passes run."""
        context: AbstractContextManager[Any] = self._context()
        return context

    def outputs(
        self, tokens: Tensor, *, positions: Tensor | None = None, document: Tensor | None = None
    ) -> Tensor:
        """What the last layer gives every token.

        Args:
            tokens: Rows, padded on the right, shape [B, L].
            positions: Of each token in its document, shape [B, L]; None counts from the row's beginning.
            document: Which document each token belongs to, shape [B, L]; None where a row is one document.

        Returns:
            Shape [B, L, V] of a policy, the logits of the next token; [B, L, 1] of a critic.
        """
        mask = None if document is None else document_mask(document)
        outputs: Tensor = self.module(tokens, positions=positions, attention_masks=mask)
        return outputs.full_tensor() if hasattr(outputs, "full_tensor") else outputs

    def outputs_before(self, rows: PackedRows) -> Tensor:
        """What the last layer gives where each loss token is yet to come, float32, shape [T, V] or [T, 1]."""
        outputs = self.outputs(
            torch.from_numpy(rows.tokens).to(self.device),
            positions=torch.from_numpy(rows.positions).to(self.device),
            document=None if rows.one_a_row else torch.from_numpy(rows.document).to(self.device),
        )
        row, column = torch.from_numpy(rows.row), torch.from_numpy(rows.column)
        return outputs[row.to(self.device), column.to(self.device)].float()

    @property
    def data_rank(self) -> int:
        """Which of the data-parallel ranks this one is."""
        return int(self._data_mesh.get_local_rank())

    @property
    def data_ranks(self) -> int:
        """How many ranks work on different parts of a batch."""
        return int(self._data_mesh.size())

    def sum_over_data(self, values: Tensor) -> Tensor:
        """The sum of a tensor on the CPU over the data-parallel ranks."""
        return self._over_data(values, dist.ReduceOp.SUM)

    def max_over_data(self, values: Tensor) -> Tensor:
        """The maximum, likewise."""
        return self._over_data(values, dist.ReduceOp.MAX)

    def _over_data(self, values: Tensor, operation: Any) -> Tensor:
        if self.data_ranks > 1:
            values = values.to(self.device)
            dist.all_reduce(values, op=operation, group=self._data_mesh.get_group())
        return values.cpu()

    @property
    def _data_mesh(self) -> Any:
        return self.parallel_dims.get_mesh("fsdp")


class TitanModel(TitanDecoder):
    """A policy or a reference, which gives logits. See `TitanDecoder` for how it is made."""

    def logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, document: Tensor | None = None
    ) -> Tensor:
        """Next-token logits, shape [B, L, V]. See `outputs`."""
        return self.outputs(tokens, positions=positions, document=document)

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the weights, as DTensors under their Hugging Face names.

        They share the model's storage: an update changes them.
        """
        state = self.adapter.to_hf(self.module.state_dict())
        return {name: value.detach() for name, value in state.items()}

    def hf_state_dict(self, *, keep: bool = True) -> dict[str, Tensor]:
        """The weights under their Hugging Face names, whole and detached. All ranks have to ask.

        They are in the host's memory, and on one rank of a CPU share the model's storage. They are gathered one by one:
        a GPU that holds its part of a model need not have room for all of it.

        Args:
            keep: Whether this rank wants them, or only helps others to have them; then there are none.
        """
        kept: dict[str, Tensor] = {}
        for name, value in self.sharded_state_dict().items():
            whole = value.full_tensor().cpu() if hasattr(value, "full_tensor") else value
            if keep:
                kept[name] = whole
        return kept


def _filled(module: Any, device: torch.device) -> Any:
    """The module with memory of its own, of which the checkpoint fills the parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):  # gloo cannot divide while it sums
            part.set_force_sum_reduction_for_comms(True)
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_states(buffer_device=None)
    return module


def _check(spread: Parallelism, ranks: int) -> None:
    if spread.pipeline != 1:
        raise ConfigError(
            f"expected no pipeline parallelism, got {spread.pipeline} stages; the model's layers stay together: "
            "spread it by data parallelism (more ranks) and tensor parallelism"
        )
    if spread.tensor < 1 or ranks % spread.tensor:
        raise ConfigError(
            f"expected a tensor-parallel degree that divides the trainer's ranks, got {spread.tensor} and {ranks} ranks"
        )
