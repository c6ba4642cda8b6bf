"""Estimates of a run's memory, broadcast time and cost, before anything is rented. Imports nothing heavy."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from rl_bridge.buffer.forest import block_length
from rl_bridge.config import Config, LoraConfig, MonarchConfig, RoleConfig
from rl_bridge.config.trainer import Checkpointing
from rl_bridge.errors import ModelError
from rl_bridge.services.placement import Placement, ServiceOptions, options_of, order_for_placement
from rl_bridge.titan.architecture import Architecture, architecture_of, read_hf_config

INDEX: Final = "model.safetensors.index.json"
PARAMETERS_HINT: Final = "or say how large the model is by --parameters"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """The size of a model; a tied output layer is counted once. The architecture may be unknown."""

    parameters: int
    architecture: Architecture | None = None

    @property
    def critic_parameters(self) -> int:
        """Parameters of a critic with this body and a scalar head; `parameters` if the architecture is unknown."""
        architecture = self.architecture
        if architecture is None:
            return self.parameters
        return (
            self.parameters - (0 if architecture.tied else architecture.output_parameters) + architecture.dim
        )

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Parameters of the LoRA adapters, rank x (inputs + outputs) each; 0 if the architecture is unknown."""
        architecture = self.architecture
        if architecture is None:
            return 0
        queries = architecture.heads * architecture.head_dim
        keys = architecture.kv_heads * architecture.head_dim
        widths_by_target = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        widths = (widths_by_target.get(target, architecture.hidden_dim) for target in lora.targets)
        return architecture.layers * lora.rank * sum(architecture.dim + width for width in widths)

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read the size from a checkpoint's config.json, or else from the headers of its weights.

        Raises:
            ModelError: Neither gives it.
        """
        try:
            config = read_hf_config(folder)
        except ModelError as error:
            raise ModelError(f"{error}; {PARAMETERS_HINT}") from error
        try:
            architecture = architecture_of(config, where=str(folder))
        except ModelError as error:  # a reward model may have an unsupported architecture
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise ModelError(f"{error}, or the weights themselves; {PARAMETERS_HINT}") from error
            return cls(parameters=_count_stored(folder, files))
        return cls(parameters=architecture.parameters, architecture=architecture)


def parse_count(text: str) -> int:
    """Parse a number of parameters such as 8030261248, 8e9, 8B, 1.7b or 350M; ValueError if it is not one."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    number = float(text if factor is None else text[:-1]) * (factor or 1.0)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"expected a number of parameters such as 8B or 8e9, got {text!r}")
    return round(number)


def _count_stored(folder: Path, files: list[Path]) -> int:
    """Count the parameters in the safetensors files of a checkpoint; ModelError if a file is missing."""
    path = folder / INDEX
    try:
        names = (
            set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()) if path.exists() else ()
        )
        missing = sorted({*names} - {file.name for file in files})
        count = 0
        for path in () if missing else files:
            with path.open("rb") as reader:  # the header's length in 8 bytes, then the header in JSON
                header = json.loads(reader.read(int.from_bytes(reader.read(8), "little")))
            count += sum(
                math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ModelError(f"expected an index or a file of safetensors at {str(path)!r}: {error!r}") from error
    if missing:
        raise ModelError(
            f"expected all files of weights that {INDEX} names at {str(folder)!r}, {len(missing)} are missing, "
            f"{missing[0]} among them; {PARAMETERS_HINT}"
        )
    return count


TRAINER_BYTES: Final = 16
"""Bytes per trained parameter: master weight, gradient and Adam's two moments, 4 bytes each."""
BYTES_EXPLANATION: Final = (
    "16 bytes a parameter (weights, gradients, two moments, float32 each; in bf16 beside float32 masters "
    "2 + 2 + 4 + 8); the guide's 14 leaves the 2 of the gradients out"
)
FROZEN_BYTES: Final = 4
"""Bytes per frozen parameter: reference model, reward model and the weights beside adapters are float32."""
KEPT_VERSIONS: Final = 2
"""Versions of the weights that the publisher keeps in memory; up to four if readers are slow."""
IN_TRANSIT: Final = f"{KEPT_VERSIONS} versions of the weights on their way"
ASLEEP: Final = "weights, in the trainer's turn, with what page-locking rounds up"
"""vLLM backs up a sleeping generator's weights in PyTorch's page-locked memory, whose blocks are powers of two: at most
twice the weights, which stay allocated while it is awake."""
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2})


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleMemory:
    """The memory of one replica of a role, in bytes by purpose.

    Attributes:
        processes: Processes that a replica is spread over evenly.
        parts: Memory of the whole replica, shared by its processes.
        per_process: Memory that each process needs in addition.
        at_best: Memory that it would use if available, and can do without.
        host: Memory of the replica's hosts; without GPUs it comes on top of the others.
        gpu_share: The share of a GPU's memory that it may use.
    """

    role: str
    replicas: int
    processes: int
    parts: Mapping[str, int]
    per_process: Mapping[str, int] = field(default_factory=dict)
    at_best: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    gpu_share: float = 1.0

    def fits(self, gpu_bytes: float) -> bool:
        """Whether a process fits on a GPU with so many bytes of memory."""
        return self.free_bytes(gpu_bytes) >= 0

    def free_bytes(self, gpu_bytes: float) -> float:
        """Bytes that its share of such a GPU has left beside a process; negative if the process does not fit."""
        return gpu_bytes * self.gpu_share - self.process_bytes

    @property
    def process_bytes(self) -> int:
        """Bytes that each process, and so each GPU, needs at least."""
        return -(-sum(self.parts.values()) // self.processes) + sum(self.per_process.values())


def sent_bytes(size: ModelSize, config: Config | None) -> int:
    """Return the bytes of a version of the weights, or adapters, as sent to generators, in the model's dtype."""
    if config is None:
        return 2 * size.parameters
    lora = config.pushed_adapter
    return DTYPE_BYTES[config.model.dtype] * (
        size.parameters if lora is None else size.adapter_parameters(lora)
    )


def memory_of_roles(
    config: Config, size: ModelSize, reward_model: ModelSize | None = None
) -> list[RoleMemory]:
    """Return the memory of a run's roles, given the sizes of the policy and of `reward.model`, if any."""
    roles, width, architecture = config.monarch.roles, DTYPE_BYTES[config.model.dtype], size.architecture
    roles_memory = [
        _trainer_memory(config, size),
        RoleMemory(
            role="policy",
            replicas=roles.policy.min_replicas,
            processes=config.generator.tensor_parallel,
            parts={"weights": width * size.parameters, **_cache_memory(config, size, width)},
            # The largest tensor, held beside the one that it replaces.
            per_process=(
                {"a tensor of new weights": width * architecture.output_parameters} if architecture else {}
            )
            | in_transit_on_gpu(config, sent_bytes(size, config)),
            at_best=_full_cache_memory(config, size, width),
            host=_receive_bytes(config, sent_bytes(size, config))
            | ({ASLEEP: 2 * width * size.parameters} if config.monarch.colocate else {}),
            gpu_share=config.rollout.gpu_memory_utilization,
        ),
    ]
    if config.has_opponent:  # another such engine, which takes whole weights
        sent = DTYPE_BYTES[config.model.dtype] * size.parameters
        opponent = replace(roles_memory[1], role="opponent", replicas=roles.opponent.min_replicas)
        roles_memory.append(replace(opponent, host=_receive_bytes(config, sent)))
    if config.has_reference:
        pass_bytes = _pass_memory(config, size, trains=False)
        takes_turns = config.monarch.colocate and roles.reference.gpus
        offloaded = {"weights, in others' turns": FROZEN_BYTES * size.parameters} if takes_turns else {}
        roles_memory.append(
            replace(_make_frozen_role("reference", roles.reference, size, pass_bytes), host=offloaded)
        )
    if reward_model is not None:
        roles_memory.append(_make_frozen_role("reward", roles.reward, reward_model, {}))
    return roles_memory


def _trainer_memory(config: Config, size: ModelSize) -> RoleMemory:
    role, sent = config.monarch.roles.trainer, sent_bytes(size, config)
    critic, body = config.algorithm.advantage == "gae", size.critic_parameters
    if (lora := config.model.lora) is None:
        trained = size.parameters + (body if critic else 0)
        parts = {
            "master weights": 4 * size.parameters,
            "gradients": 4 * size.parameters,
            "Adam's moments": 8 * size.parameters,
            **({"critic": TRAINER_BYTES * body} if critic else {}),
        }
    else:
        adapters = size.adapter_parameters(lora)
        trained = adapters * (2 if critic else 1)
        parts = {
            "frozen weights": FROZEN_BYTES * size.parameters,
            "adapters": TRAINER_BYTES * adapters,
            **({"critic": FROZEN_BYTES * body + TRAINER_BYTES * adapters} if critic else {}),
        }
    parts = {name: config.trainer.parallel.hsdp * part for name, part in parts.items()}
    host_memory = {IN_TRANSIT: KEPT_VERSIONS * sent}
    if config.monarch.transport == "torchstore":
        host_memory = {
            "a version that is being put": sent,
            f"{KEPT_VERSIONS} versions in the volume, on the controller's host": KEPT_VERSIONS * sent,
        }
    elif config.monarch.transport == "cuda_ipc":
        host_memory = {}
    if config.trainer.checkpoint_interval:
        host_memory["weights and moments, to be written to a checkpoint"] = (TRAINER_BYTES - 4) * trained
    if config.monarch.colocate:
        host_memory["what it trains, in the generators' turn"] = sum(parts.values()) - parts.get(
            "gradients", 0
        )
    return RoleMemory(
        role="trainer",
        replicas=1,
        processes=role.ranks,
        parts=parts,
        per_process=_pass_memory(config, size, trains=True) | in_transit_on_gpu(config, sent),
        host=host_memory,
    )


KEY_COPIES: Final = 4
"""The most copies of a token's keys and values with shared prefixes; see `rl_bridge.buffer.forest.block_length`."""
MASK_BYTES: Final = 6
"""Per query and key of a block: 4 of the number that is added to the score, and one each of the mask that it is made
from and of that mask's copy."""
USABLE_SHARE: Final = 0.75
"""The share of a GPU's memory for what is estimated here. The rest is for fragmentation, CUDA, NCCL, and what a
generator that sleeps on the same GPU leaves there."""


def bytes_by_checkpointing(config: Config, size: ModelSize) -> dict[Checkpointing, int]:
    """Return a trainer rank's bytes for each kind of activation checkpointing, least recomputation first.

    Empty for a model of unknown shapes.
    """
    if size.architecture is None:
        return {}
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    return {kind: _trainer_memory(with_checkpointing(config, kind), size).process_bytes for kind in kinds}


def choose_checkpointing(needed: Mapping[Checkpointing, int], gpu_bytes: float) -> Checkpointing:
    """Return the kind that `auto` stands for on a GPU: the first of `bytes_by_checkpointing` that fits, else full."""
    return next(
        (kind for kind, needed_bytes in needed.items() if needed_bytes <= USABLE_SHARE * gpu_bytes), "full"
    )


def with_checkpointing(config: Config, kind: Checkpointing) -> Config:
    """Return the configuration with another kind of activation checkpointing."""
    trainer = config.trainer.model_copy(update={"activation_checkpointing": kind})
    return config.model_copy(update={"trainer": trainer})


def in_transit_on_gpu(config: Config, sent: int) -> dict[str, int]:
    """Return what a trainer rank keeps on its GPU for readers there, whoever's turn the GPU is (`cuda_ipc` only)."""
    if config.monarch.transport != "cuda_ipc":
        return {}
    role = config.monarch.roles.trainer
    return {IN_TRANSIT: -(-KEPT_VERSIONS * sent // role.ranks)}


def _make_frozen_role(
    role: str, config: RoleConfig, size: ModelSize, per_process: Mapping[str, int]
) -> RoleMemory:
    return RoleMemory(
        role=role,
        replicas=config.min_replicas,
        processes=config.ranks,
        parts={"weights": FROZEN_BYTES * size.parameters},
        per_process=per_process,
    )


def _pass_memory(config: Config, size: ModelSize, *, trains: bool) -> dict[str, int]:
    """Return the bytes that each process needs during a pass, by purpose; tensor-parallel ranks share them.

    They are the most of what the backward pass needs in the last layer, in the last block and, with replicas of the
    weights, in the first block.

    A block keeps, per token, what TorchTitan's Qwen3 saves for its backward pass. On a GPU, where the norm is one
    kernel, these are 4 x hidden_dim + 4 x dim + 3 x (queries and keys) values of the model's dtype: for the 28 layers
    of 0.6B this gives 35.7 GB, measured 35.6 GB on an H200. On a CPU they are 4 x hidden_dim + 3 x dim + 2 x (queries
    and keys), and in float32 4 x dim + 2 x (queries and keys). With full activation checkpointing a block keeps only
    its input, and one block at a time is recomputed, with its gradients (Chen et al., arXiv 1604.06174); with selective
    it also keeps the outputs of attention and of every second matrix product. With shared prefixes a block of queries
    has its own keys and values, at most `KEY_COPIES` more than there are tokens, on a GPU for every head. All layers
    have one mask of them, on every tensor-parallel rank.
    """
    architecture = size.architecture
    if architecture is None:
        return {}
    trainer, width = config.trainer, DTYPE_BYTES[config.model.dtype]
    tokens = max(trainer.tokens_per_pass, config.rollout.max_length)
    heads = architecture.heads + architecture.kv_heads
    parallel = trainer.parallel if trains else config.reference_parallel
    vocabulary = -(-architecture.vocabulary // parallel.tp)
    heads_width = heads * architecture.head_dim
    roles = config.monarch.roles
    on_gpus = bool((roles.trainer if trains else roles.reference).gpus)
    if on_gpus:
        block = width * (4 * architecture.dim + 3 * heads_width)
    else:
        block = width * (3 * architecture.dim + 2 * heads_width) + 4 * (
            4 * architecture.dim + 2 * heads_width
        )
    block += _network_bytes(architecture, width)
    copies = KEY_COPIES if config.shares_prefixes else 0
    copied_heads = architecture.heads if on_gpus else architecture.kv_heads
    copied = copies * 2 * copied_heads * architecture.head_dim * width
    outer_values = (8 + width) * architecture.dim  # the embedding, the last norm, the output layer's input
    memory = dict[str, int]()
    if config.shares_prefixes:
        longest = config.rollout.max_length
        memory["mask of shared prefixes"] = MASK_BYTES * tokens * (longest + block_length(longest))
    cast_width = 0 if width == 4 else width
    output, experts = vocabulary * architecture.dim, architecture.expert_parameters
    layer = (architecture.layer_parameters - experts) // parallel.tp + experts // parallel.ep
    logits = {"logits of a chunk": 2 * trainer.tokens_per_chunk * vocabulary * 4}
    if not trains:
        return (memory | logits) | {
            "gathered layers": width * (output + 2 * layer),
            "activations": tokens * (block + copied + outer_values) // parallel.tp,
        }
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    products = queries + 2 * keys + architecture.dim
    if architecture.experts:  # what is sent to experts and back is kept, whatever it is multiplied by
        products += architecture.experts + 4 * architecture.experts_per_token * architecture.dim
    else:
        products += 2 * architecture.hidden_dim + architecture.dim
    kept_per_token = {"full": architecture.dim, "selective": architecture.dim + queries + products // 2}
    kept_per_token["auto"] = kept_per_token["full"]  # keeps more only if there is room
    if (kind := trainer.activation_checkpointing) in kept_per_token:
        saved, in_use = architecture.layers * kept_per_token[kind] * width, 2 * (block + copied)
    else:
        saved, in_use = architecture.layers * (block + copied), block + copied
    activations = {"activations": tokens * (saved + outer_values) // parallel.tp}
    # The last layer's gradient is accumulated in float32, while FSDP gathers the block before it.
    gathered = (width + 4 + cast_width) * output + width * layer
    phases = [activations | logits | {"gathered layers": gathered}]
    # A block has its weights, their gradient, and its copy to be reduced in float32; FSDP gathers the one before it.
    block_pass = {
        "gathered layers": (3 * width + 4) * layer,
        "a block's backward pass": tokens * in_use // parallel.tp,
    }
    phases.append(activations | block_pass)
    if parallel.hsdp > 1:
        # What the replicas sum up is kept until the end, beside the gradients of earlier passes.
        trained = size.parameters if config.model.lora is None else size.adapter_parameters(config.model.lora)
        shards = config.monarch.roles.trainer.ranks // parallel.hsdp
        phases.append(block_pass | {"gradients on their way to other replicas": 4 * trained // shards})
    return memory | max(phases, key=lambda phase: sum(phase.values()))


def _network_bytes(architecture: Architecture, width: int) -> int:
    """Return what the feed-forward network keeps of a token for its backward pass, or the experts that it is sent to.

    With a router each of these has its own copy of the input, and its output in float32; the router computes in float32
    and has a score and a flag for every expert.
    """
    dim, hidden_dim = architecture.dim, architecture.hidden_dim
    if not architecture.experts:
        return 4 * hidden_dim * width
    routed = architecture.experts_per_token * (width * (4 * hidden_dim + dim) + 4 * dim)
    return routed + 4 * dim + 5 * architecture.experts


def _receive_bytes(config: Config, sent: int) -> dict[str, int]:
    """Return host memory for received weights, if they are copied to the generator or on to its engine's process."""
    monarch, memory = config.monarch, dict[str, int]()
    if monarch.transport in ("rdma", "torchstore") or (monarch.transport == "auto" and not monarch.is_local):
        memory["a version that was received"] = sent
    if config.generator.engine == "vllm_async" and monarch.transport != "cuda_ipc":
        memory["a version handed to the engine's process"] = sent
    return memory


def _cache_bytes_per_token(architecture: Architecture, width: int) -> int:
    return 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * width


def _cache_memory(config: Config, size: ModelSize, width: int) -> dict[str, int]:
    """Return the least key-value cache: the configured size on a CPU, room for the longest row on a GPU."""
    if not config.monarch.roles.policy.gpus:
        return {"key-value cache": config.rollout.kv_cache_mb << 20}
    if size.architecture is None:
        return {}
    row = config.rollout.max_length * _cache_bytes_per_token(size.architecture, width)
    return {"key-value cache of the longest row": row}


def _full_cache_memory(config: Config, size: ModelSize, width: int) -> dict[str, int]:
    """Return the key-value cache of `max_num_seqs` prompts of full length; with less the engine runs fewer at once."""
    if size.architecture is None:
        return {}
    tokens = config.rollout.max_num_seqs * config.rollout.max_length
    return {"a full key-value cache": tokens * _cache_bytes_per_token(size.architecture, width)}


@dataclass(kw_only=True, slots=True)
class RentedFleet:
    """Rented GPUs and their cost, in any currency; prices are per GPU and hour.

    Attributes:
        spot_gpus: GPUs that may be preempted: the generators', whose work others take over.
        on_demand_gpus: The others: the trainer's, whose loss would stop the run.
        spot_kind_on_demand_price: The on-demand price of the spot kind of GPU, which savings are relative to; equal to
            `on_demand_price` if all GPUs are of one kind.
        hours: How long all are rented.
        cost: The total; `spot_cost` and `on_demand_cost` are its parts.
        all_on_demand: The cost of the same GPUs if all were on demand.
        saved_share: The share of `all_on_demand` that is saved, from 0 to 1; 0 if that is 0.
    """

    spot_gpus: int
    on_demand_gpus: int
    spot_price: float
    on_demand_price: float
    spot_kind_on_demand_price: float
    hours: float
    spot_cost: float = field(init=False)
    on_demand_cost: float = field(init=False)
    cost: float = field(init=False)
    all_on_demand: float = field(init=False)
    saved_share: float = field(init=False)

    def __post_init__(self) -> None:
        self.spot_cost = self.spot_gpus * self.spot_price * self.hours
        self.on_demand_cost = self.on_demand_gpus * self.on_demand_price * self.hours
        self.cost = self.spot_cost + self.on_demand_cost
        spot_on_demand = self.spot_gpus * self.spot_kind_on_demand_price * self.hours
        self.all_on_demand = spot_on_demand + self.on_demand_cost
        self.saved_share = 1.0 - self.cost / self.all_on_demand if self.all_on_demand else 0.0


@dataclass(kw_only=True, slots=True, frozen=True)
class BroadcastPlan:
    """How long sending new weights takes at one bandwidth.

    Attributes:
        gbps: The bandwidth in 10^9 bits per second.
        seconds: Time until a single generator has them.
        all_seconds: Time until all generators have them; None without a configuration.
        idle: The generators' idle share in a synchronous loop, from 0 to 1; None without a rollout time.
    """

    gbps: float
    seconds: float
    all_seconds: float | None
    idle: float | None


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPlan:
    """The plan of a run before it starts; parts that lack a configuration or prices are omitted.

    Attributes:
        parameters: Parameters of the policy.
        adapters: Parameters of the policy's adapters; None if all parameters are trained.
        trainer_bytes: What the trainer keeps for them between steps, over all its ranks.
        sent_bytes: Bytes of one version of the weights, sent to each generator.
        broadcasts: One per bandwidth.
        decided: Keys whose defaults depend on the GPUs, with their values.
    """

    parameters: int | None = None
    adapters: int | None = None
    trainer_bytes: int | None = None
    roles: tuple[RoleMemory, ...] = ()
    sent_bytes: float | None = None
    generators: int | None = None
    broadcasts: tuple[BroadcastPlan, ...] = ()
    fleet: RentedFleet | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)

    def with_memory(
        self, size: ModelSize, config: Config | None, *, gpu_bytes: float | None = None
    ) -> "RunPlan":
        """Add the memory of each role, or of the trainer alone without a configuration.

        `trainer.activation_checkpointing=auto` is resolved for a GPU with `gpu_bytes`; without that it is planned with
        the least memory.
        """
        roles: tuple[RoleMemory, ...] = ()
        if config is not None:
            if config.trainer.activation_checkpointing == "auto" and gpu_bytes is not None:
                kind = choose_checkpointing(bytes_by_checkpointing(config, size), gpu_bytes)
                config = with_checkpointing(config, kind)
            path = config.reward.model
            reward_model = None if path is None else ModelSize.of_folder(Path(os.path.expanduser(path)))
            roles = tuple(memory_of_roles(config, size, reward_model))
        trainer_bytes = TRAINER_BYTES * size.parameters
        if roles:
            trainer_bytes = sum(part_bytes for name, part_bytes in roles[0].parts.items() if name != "critic")
        lora = None if config is None else config.model.lora
        adapters = None if lora is None else size.adapter_parameters(lora)
        return replace(
            self,
            parameters=size.parameters,
            adapters=adapters,
            trainer_bytes=trainer_bytes,
            roles=roles,
            decided={} if config is None else config.decided_by_gpus(),
        )

    def with_broadcasts(
        self, size_bytes: float, gbps: Sequence[float], rollout_s: float | None, config: Config | None
    ) -> "RunPlan":
        """Add the time to send `size_bytes` at each bandwidth, and the idle share beside a rollout of `rollout_s`.

        Each generator fetches a version from the trainer's hosts, each of which has a share of it; with TorchStore
        from the controller's host. A host receives one copy for each of its generators.
        """
        receivers, copies = None, 1.0
        if config is not None:
            monarch = config.monarch
            receivers = monarch.roles.policy.min_replicas
            senders = 1 if monarch.transport == "torchstore" else monarch.roles.trainer.hosts
            copies = max(receivers / senders, _max_generators_per_host(monarch))
        broadcasts = []
        for bandwidth in gbps:
            seconds = size_bytes * 8 / (bandwidth * 1e9)
            idle = None if rollout_s is None else copies * seconds / (copies * seconds + rollout_s)
            all_seconds = None if receivers is None else copies * seconds
            broadcasts.append(
                BroadcastPlan(gbps=bandwidth, seconds=seconds, all_seconds=all_seconds, idle=idle)
            )
        return replace(self, sent_bytes=size_bytes, generators=receivers, broadcasts=tuple(broadcasts))

    def as_json(self, *, gpu_gb: float | None = None) -> dict[str, Any]:
        """Return the plan as JSON values; with the memory of one GPU, in GB, also whether each role fits."""
        document = asdict(self)
        for row, role in zip(document["roles"], self.roles, strict=True):
            row["process_bytes"] = role.process_bytes
            if gpu_gb is not None:
                row["fits"] = role.fits(gpu_gb * 1e9)
        return document


def split_spot_gpus(config: Config) -> tuple[int, int]:
    """Return how many GPUs of a run may be spot, and how many may not.

    With `rollout.spot_eligible` the generators' may, unless colocated. A run cannot go on without its trainer,
    reference or reward model.
    """
    total, policy = config.monarch.gpus, config.monarch.roles.policy
    is_spot = config.rollout.spot_eligible and not config.monarch.colocate
    spot = policy.min_replicas * policy.gpus if is_spot else 0
    return spot, total - spot


def _max_generators_per_host(monarch: MonarchConfig) -> int:
    """Return the most generators on one host when the run places them and the trainer."""
    if not (monarch.gpus_per_node and monarch.roles.policy.gpus):
        # Generators run on CPUs, or the hosts' GPUs are not configured yet: assume an even spread.
        return math.ceil(monarch.roles.policy.min_replicas / monarch.num_nodes)
    placement, generators_by_host = Placement(monarch.num_nodes, monarch.gpus_per_node), Counter[int]()
    roles = {
        name: ServiceOptions(
            **options_of(getattr(monarch.roles, name)), gpu_pool=name if monarch.colocate else ""
        )
        for name in ("trainer", "policy")
    }
    for name in order_for_placement(roles):
        for _ in range(getattr(monarch.roles, name).min_replicas):
            slot = placement.reserve(roles[name], 0.0)
            if name == "policy":
                generators_by_host[slot.first] += 1
    return max(generators_by_host.values())
