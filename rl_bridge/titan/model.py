"""A TorchTitan model from a checkpoint in the Hugging Face layout, on a GPU or a CPU."""

import json
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.fsdp import FSDPModule

from rl_bridge.errors import ConfigError, ModelError
from rl_bridge.titan.ranks import is_of_siblings, join_process_group

# TorchTitan takes a machine without an accelerator for one with CUDA; its modules read this on import.
if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, _build_qwen3_layers, _qwen3_norm, parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from rl_bridge.titan.attention import DocumentAttention, document_mask

# Every parameter is read from the checkpoint, so none needs to be drawn first.
_FROM_CHECKPOINT = {"weight": skip_param_init}

SUPPORTED = ("qwen3",)


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


def own_device() -> torch.device:
    """Where this process computes: its first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TitanModel:
    """A policy whose weights came from a folder in the Hugging Face layout.

    Args:
        path: The folder: config.json and safetensors.
        dtype: What the forward pass computes in. Parameters are kept in float32.
        max_length: The longest row, in tokens.
        trainable: False keeps no gradients.
        device: Where it computes.
        spread: Over the process group, which has one rank where nobody made one before.

    Attributes:
        module: The TorchTitan module.
        adapter: Translates state dicts to the Hugging Face names and back.
        parallel_dims: TorchTitan's description of the ranks.
        row_multiple: Rows have a length that is a multiple of this.

    Raises:
        ConfigError: The ranks cannot be divided as asked.
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
        model_config = _qwen3_config(Path(path))
        try:
            model_config.update_from_config(
                config=SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
            )
        except ValueError as error:  # attention heads that cannot be divided
            raise ConfigError(f"this model cannot be spread as asked: {error}") from error
        with torch.device("meta"), titan_utils.set_default_dtype(torch.float32):
            module = model_config.build()
        with tempfile.TemporaryDirectory() as scratch:  # it wants a folder for dumps that are never asked for
            module = parallelize_qwen3(
                module,
                parallel_dims=self.parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=CompileConfig(enable=False),
                ac_config=None,
                dump_folder=scratch,
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):  # gloo cannot divide while it sums
                part.set_force_sum_reduction_for_comms(True)
        module.to_empty(device=device)
        with torch.no_grad():
            module.init_states(buffer_device=None)
        self.module = module.train(trainable).requires_grad_(trainable)
        self.adapter = Qwen3StateDictAdapter(model_config, str(path))
        self._load(Path(path))

    def _load(self, path: Path) -> None:
        state = self.adapter.to_hf(self.module.state_dict())
        try:
            load_checkpoint(state, storage_reader=HuggingFaceStorageReader(path=str(path)))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            if is_of_siblings(error):
                raise
            raise ModelError(f"cannot load the weights at {str(path)!r}: {error}") from error
        self.module.load_state_dict(self.adapter.from_hf(state))

    def spmd(self) -> AbstractContextManager[Any]:
        """The context in which forward and backward passes run."""
        context: AbstractContextManager[Any] = self._context()
        return context

    def logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, document: Tensor | None = None
    ) -> Tensor:
        """Next-token logits.

        Args:
            tokens: Rows, padded on the right, shape [B, L].
            positions: Of each token in its document, shape [B, L]; None counts from the row's beginning.
            document: Which document each token belongs to, shape [B, L]; None where a row is one document.

        Returns:
            Shape [B, L, V].
        """
        mask = None if document is None else document_mask(document)
        logits: Tensor = self.module(tokens, positions=positions, attention_masks=mask)
        return logits.full_tensor() if hasattr(logits, "full_tensor") else logits

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

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the weights, as DTensors under their Hugging Face names.

        They share the model's storage: an update changes them.
        """
        state = self.adapter.to_hf(self.module.state_dict())
        return {name: value.detach() for name, value in state.items()}

    def hf_state_dict(self) -> dict[str, Tensor]:
        """The weights under their Hugging Face names, whole and detached. All ranks have to ask.

        On one rank they share the model's storage.
        """
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in self.sharded_state_dict().items()
        }


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


def _qwen3_config(path: Path) -> Any:
    config = read_hf_config(path)
    if config.get("model_type") not in SUPPORTED:
        raise ModelError(
            f"expected an architecture among {', '.join(SUPPORTED)}, got {config.get('model_type')!r} at {str(path)!r}"
        )
    dim, head_dim, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    tied = bool(config.get("tie_word_embeddings"))
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ModelError(f"expected plain rotary embeddings, got scaled ones at {str(path)!r}")
    layers = _build_qwen3_layers(
        n_layers=config["num_hidden_layers"],
        dim=dim,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        hidden_dim=config["intermediate_size"],
        attn_backend="flex",
        fuse_qkv=False,  # a fused one is gathered whole on every rank whenever the weights are asked for
        rope=CosSinRoPE.Config(
            dim=head_dim, max_seq_len=config["max_position_embeddings"], theta=rope["rope_theta"]
        ),
    )
    for layer in layers:
        layer.attention.inner_attention = DocumentAttention.Config()
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=_qwen3_norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=_FROM_CHECKPOINT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=_FROM_CHECKPOINT),
        layers=layers,
    )


def read_hf_config(path: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint.

    Raises:
        ModelError: There is none, or it is not JSON.
    """
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"expected a checkpoint with a config.json at {str(path)!r}: {error}") from error
    return config
