"""What each role keeps in memory, by the sizes of a model's tensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from rl_bridge.config import Config, LoraConfig
from rl_bridge.config.schema import LoraTarget
from rl_bridge.errors import ModelError

DENSE: Final = ("llama", "qwen2", "qwen3")
"""Architectures whose parameters can be counted by their config.json alone."""
INDEX: Final = "model.safetensors.index.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """How large a model is.

    Attributes:
        parameters: How many; a tied output layer is counted once.
        vocabulary: Entries; None where only the number of parameters is known.
        cached_per_token: Numbers that the key-value cache keeps of each token, over all layers; None likewise.
        output_layer: Parameters of the output layer that are no others' too: none of a tied one; None likewise.
        width: Of the hidden state; None likewise.
        linear: Rows and columns of each layer that an adapter may be for, over all blocks; None likewise.
    """

    parameters: int
    vocabulary: int | None = None
    cached_per_token: int | None = None
    output_layer: int | None = None
    width: int | None = None
    linear: Mapping[LoraTarget, int] | None = field(default=None, compare=False)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Of a model's adapters; 0 where only the number of parameters is known."""
        return 0 if self.linear is None else lora.rank * sum(self.linear[target] for target in lora.targets)

    @property
    def critic_parameters(self) -> int:
        """Of a critic with this body: one number a token in place of logits. All of them where only those are known."""
        if self.output_layer is None or self.width is None:
            return self.parameters
        return self.parameters - self.output_layer + self.width

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read it off a checkpoint in the Hugging Face layout.

        Weights are looked at only where the configuration does not say it: some may be missing, or quantised.

        Raises:
            ModelError: There is no config.json that says it, or a file of weights is none.
        """
        config = _config(folder)
        try:
            tied, width = bool(config.get("tie_word_embeddings")), config["hidden_size"]
            heads = config["num_attention_heads"]
            head = config.get("head_dim") or width // heads
            kv_heads = config.get("num_key_value_heads") or heads
            return cls(
                parameters=(
                    _counted(config, head, heads, kv_heads)
                    if config.get("model_type") in DENSE
                    else _stored(folder, config.get("model_type"))
                ),
                vocabulary=config["vocab_size"],
                cached_per_token=2 * config["num_hidden_layers"] * kv_heads * head,
                output_layer=0 if tied else config["vocab_size"] * width,
                width=width,
                linear=_linear(config, heads * head, kv_heads * head),
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelError(
                f"expected the config.json of a language model in {str(folder)!r}, it does not say {error}"
            ) from error


def parse_count(text: str) -> int:
    """A number of parameters as people write it: 8030261248, 8e9, 8B, 1.7b, 350M.

    Raises:
        ValueError: It is none.
    """
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    number = float(text if factor is None else text[:-1]) * (factor or 1.0)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"expected a number of parameters such as 8B or 8e9, got {text!r}")
    return round(number)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"expected a checkpoint with a config.json at {str(folder)!r}: {error}; "
            "without one say how large the model is by --parameters"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"expected an object in the config.json at {str(folder)!r}, got {config!r:.100}")
    return config


def _stored(folder: Path, kind: object) -> int:
    """Numbers in the files of weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"expected the weights, or an architecture among {', '.join(DENSE)} to count by its config.json, "
            f"got {kind!r}; say how large the model is by --parameters"
        )
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        missing = sorted(set(index["weight_map"].values()) - {file.name for file in files})
    except OSError:
        missing = []  # it is in one file
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"expected the names of the files of weights in {str(folder / INDEX)!r}: {error!r}"
        ) from error
    if missing:
        raise ModelError(
            f"expected all files of weights that {INDEX} names at {str(folder)!r}, {len(missing)} are missing, "
            f"{missing[0]} among them; say how large the model is by --parameters"
        )
    return sum(map(_numbers_in, files))


def _numbers_in(file: Path) -> int:
    """Of a file of safetensors, by its header: a length of 8 bytes, then JSON."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ModelError(f"expected a file of safetensors at {str(file)!r}, got: {error!r}") from error


def _counted(config: Mapping[str, Any], head: int, heads: int, kv_heads: int) -> int:
    """Embedding, layers, last norm, and the output layer unless it is the embedding."""
    kind = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = heads * head, kv_heads * head
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    if kind == "qwen2" or config.get("attention_bias"):
        layer += queries + 2 * keys + (hidden if config.get("attention_bias") else 0)
    if kind == "qwen3":
        layer += 2 * head  # norms of queries and keys
    tables = 1 if config.get("tie_word_embeddings") else 2
    parameters: int = tables * config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    return parameters


def _linear(config: Mapping[str, Any], queries: int, keys: int) -> dict[LoraTarget, int]:
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    other: dict[LoraTarget, int] = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    other |= {"gate_proj": inner, "up_proj": inner, "down_proj": inner}
    return {target: layers * (hidden + width) for target, width in other.items()}


TRAINER_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"master weights": 4, "gradients": 4, "Adam's moments": 8}
)
"""Bytes a parameter that the trainer keeps, all float32. With weights and gradients in bf16 beside master weights it
is 2 + 2 + 4 + 8, as much."""
TRAINER_BYTES_A_PARAMETER: Final = sum(TRAINER_BYTES.values())
WHY_NOT_14: Final = (
    "16 bytes a parameter (weights, gradients, two moments, float32 each; in bf16 beside float32 masters "
    "2 + 2 + 4 + 8); the guide's 14 leaves the 2 of the gradients out"
)
FROZEN_BYTES: Final = 4
"""Bytes a parameter of a model that only answers: reference and reward model keep float32."""
KEPT_VERSIONS: Final = 2
"""Versions of the weights that their publisher keeps in memory; where readers are slow, up to four."""
WIDTHS: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2})


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleMemory:
    """What one replica of a role keeps.

    Attributes:
        role: Its name in `monarch.roles`.
        replicas: How often it is there.
        processes: Over which a replica is spread, evenly.
        parts: Bytes by what they are for, of the whole replica.
        per_process: Bytes that every process has of its own, by what they are for.
        at_best: Bytes that it can do without, and would use if they were there.
        gpu_share: How much of a GPU's memory it may have.
    """

    role: str
    replicas: int
    processes: int
    parts: Mapping[str, int]
    per_process: Mapping[str, int] = field(default_factory=dict)
    at_best: Mapping[str, int] = field(default_factory=dict)
    gpu_share: float = 1.0

    def fits(self, gpu_bytes: float) -> bool:
        """Whether a process finds room on a GPU of so many bytes."""
        return self.process_bytes <= gpu_bytes * self.gpu_share

    @property
    def process_bytes(self) -> int:
        """What each process needs at least, and so each GPU."""
        return -(-sum(self.parts.values()) // self.processes) + sum(self.per_process.values())


def trainer_bytes(parameters: int, adapters: int | None = None) -> int:
    """What the trainer keeps between two steps, over all its ranks: 16 bytes a parameter that it trains, 4 of others.

    Args:
        parameters: Of the model.
        adapters: Parameters of its adapters, which alone are trained; None where all are.
    """
    if adapters is None:
        return TRAINER_BYTES_A_PARAMETER * parameters
    return FROZEN_BYTES * parameters + TRAINER_BYTES_A_PARAMETER * adapters


def sent_bytes(size: ModelSize, config: Config | None) -> int:
    """A version of the weights, or of adapters, as generators are sent it, in the type that the model computes in."""
    if config is None:
        return 2 * size.parameters
    lora = config.pushed_adapter
    return WIDTHS[config.model.dtype] * (size.parameters if lora is None else size.adapter_parameters(lora))


def memory_of_roles(
    config: Config, size: ModelSize, reward_model: ModelSize | None = None
) -> list[RoleMemory]:
    """What the roles of a run keep, activations apart: those depend on how much of a batch a pass takes.

    Args:
        config: The run.
        size: Of the policy.
        reward_model: Size of `reward.model`, where there is one.
    """
    roles, width = config.monarch.roles, WIDTHS[config.model.dtype]
    lora = config.model.lora
    adapters = None if lora is None else size.adapter_parameters(lora)
    if adapters is None:
        trainer = {name: each * size.parameters for name, each in TRAINER_BYTES.items()}
    else:
        trainer = {
            "frozen weights": FROZEN_BYTES * size.parameters,
            "adapters": TRAINER_BYTES_A_PARAMETER * adapters,
        }
    if config.algorithm.advantage == "gae":
        trainer["critic"] = trainer_bytes(size.critic_parameters, adapters)
    found = [
        RoleMemory(
            role="trainer",
            replicas=1,
            processes=roles.trainer.procs * roles.trainer.hosts,
            parts=trainer,
            per_process=_logits(config, size, config.trainer.tensor_parallel),
        ),
        RoleMemory(
            role="policy",
            replicas=roles.policy.replicas,
            processes=config.generator.tensor_parallel,
            parts={"weights": width * size.parameters, **_cache(config, size, width)},
            at_best=_full_cache(config, size, width),
            gpu_share=config.rollout.gpu_memory_utilization,
        ),
    ]
    if config.has_reference:
        logits = _logits(config, size, 1)
        found.append(_frozen("reference", roles.reference.replicas, size, per_process=logits))
    if reward_model is not None:
        found.append(_frozen("reward", roles.reward.replicas, reward_model))
    return found


def _frozen(
    role: str, replicas: int, size: ModelSize, per_process: Mapping[str, int] = MappingProxyType({})
) -> RoleMemory:
    weights = {"weights": FROZEN_BYTES * size.parameters}
    return RoleMemory(role=role, replicas=replicas, processes=1, parts=weights, per_process=per_process)


def _logits(config: Config, size: ModelSize, ranks: int) -> dict[str, int]:
    """Of a chunk of loss tokens, twice, in float32: see rl_bridge.algorithms.logprobs. The vocabulary is shared."""
    if size.vocabulary is None:
        return {}
    return {"logits of a chunk": 2 * config.trainer.tokens_per_chunk * -(-size.vocabulary // ranks) * 4}


def _cache(config: Config, size: ModelSize, width: int) -> dict[str, int]:
    """As large as the configuration says. On a GPU it is what is left, but room for the longest row has to be."""
    if not config.monarch.roles.policy.gpus:
        return {"key-value cache": config.rollout.kv_cache_mb << 20}
    if size.cached_per_token is None:
        return {}
    return {"key-value cache of the longest row": config.rollout.max_length * size.cached_per_token * width}


def _full_cache(config: Config, size: ModelSize, width: int) -> dict[str, int]:
    """So many prompts at once, all as long as they may be: with less the engine takes fewer at a time."""
    if size.cached_per_token is None:
        return {}
    tokens = config.rollout.max_num_seqs * config.rollout.max_length
    return {"a full key-value cache": tokens * size.cached_per_token * width}
