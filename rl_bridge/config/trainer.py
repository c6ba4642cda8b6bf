"""`trainer.*`: the optimisation, and the ranks that share it."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_bridge.config.sections import Count, Fraction, NonNegative, Positive, Seconds, Section

Checkpointing = Literal["auto", "none", "selective", "full"]


class TrainerOptions(Section):
    """`trainer.options.*`: fields of TorchTitan's configurations by their names, of policy and critic."""

    parallelism: dict[str, Any] = Field(default_factory=dict)
    """Of `ParallelismConfig`, such as `fsdp_reshard_after_forward`."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Of `TrainingConfig`, such as `mixed_precision_reduce`."""


class ParallelConfig(Section):
    """`trainer.parallel.*`: how the trainer's ranks share one model, by TorchTitan's dimensions.

    The ranks of monarch.roles.trainer are hsdp x fsdp x tp, consecutive ones along the last.
    """

    fsdp: Count | None = None
    """Ranks with batches of their own that share the weights (FSDP2). None: as many as the others leave."""
    tp: Count = 1
    """Ranks that share each layer and one batch. A file may also call it `trainer.tensor_parallel`."""
    ep: Count = 1
    """Ranks that share the experts of a layer, of fsdp x tp; other layers are laid out as without it."""
    hsdp: Count = 1
    """Replicas of the weights, each on fsdp x tp ranks with batches of their own."""
    cp: Count = 1
    """Not supported, like `pp`."""
    pp: Count = 1

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        if self.cp > 1:
            raise ValueError(
                f"expected trainer.parallel.cp of 1, got {self.cp}: a row stays on one rank, because shared prefixes "
                "and documents need a mask over all of its keys; for longer rows use trainer.parallel.tp, which shards "
                "activations too, and trainer.activation_checkpointing=full"
            )
        if self.pp > 1:
            raise ValueError(
                f"expected trainer.parallel.pp of 1, got {self.pp}: there are no pipelines; spread a model by fsdp, tp "
                "and ep"
            )
        return self

    def require_ranks(self, ranks: int, *, role: str = "trainer") -> None:
        """Raise ValueError if so many ranks of a role cannot be laid out in this way."""
        replica, left = divmod(ranks, self.hsdp)
        if left or replica % self.tp or self.fsdp not in (None, replica // self.tp):
            raise ValueError(
                f"expected hsdp x fsdp x tp of trainer.parallel to be the {role}'s ranks, got {self.hsdp} x "
                f"{self.fsdp or 'any'} x {self.tp} and {ranks}; change trainer.parallel, or monarch.roles.{role}"
                + (" (trainer.num_gpus)" if role == "trainer" else "")
            )
        if replica % self.ep:
            raise ValueError(
                f"expected trainer.parallel.ep to divide fsdp x tp of the {role}, got {self.ep} and {replica}"
            )


class TrainerConfig(Section):
    """`trainer.*`: the optimisation."""

    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs that train, one rank each. Roles not set in `monarch.roles` follow from it (see rl_bridge.config.monarch):
    above 0 generators get the remaining GPUs, 0 is the CPU. None leaves everything to the role table."""
    iterations: Count = 100
    """How often the loop collects, trains and synchronises."""
    updates_per_iteration: Count = 1
    """Optimizer steps per iteration; the batch is split evenly between them, by trajectory."""
    tokens_per_pass: Count = 16_384
    """Tokens that go through the model at once on each rank, counted once where they are computed once; at least
    `rollout.max_length`. Fewer take less memory and give the same gradient."""
    share_prefixes: bool = True
    """Whether tokens that several rows begin with are computed once in a pass: a prompt of a group, a system prompt of
    all. It applies where that takes fewer operations, in float32 and without `compile`. The gradient is the same."""
    tokens_per_chunk: Count = 1024
    """Loss tokens whose logits exist at once, in trainer and reference: 2 x tokens x vocabulary x 4 bytes, 1.2 GB with
    Qwen3's vocabulary. The result is the same."""
    gradient_accumulation_steps: Count = 1
    """The least forward and backward passes per optimizer step, on every rank; a small `tokens_per_pass` makes more.
    The gradient is the same."""
    activation_checkpointing: Checkpointing = "auto"
    """What the backward pass recomputes instead of keeping it, in policy and critic: nothing (none), all of a block but
    attention and every second matrix product (selective), or all of it (full). `auto`: as little as fits the GPU by
    the estimates of `ropewalk plan` (docs/training.md); nothing on a CPU. The gradient is the same."""
    compile: bool = False
    """Whether to compile the blocks of policy and critic with torch.compile. It needs a C++ compiler on every host of
    the trainer, and slows the first iterations down."""
    options: TrainerOptions = TrainerOptions()
    """Further settings of TorchTitan's, handed through as they are."""
    parallel: ParallelConfig = ParallelConfig()
    collective_timeout_s: Seconds = 300.0
    """How long ranks wait for each other."""
    learning_rate: Positive = 1e-6
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly to its value."""
    decay_fraction: Fraction = 0.0
    """The last share of the run over which the learning rate falls linearly."""
    final_lr_factor: Fraction = 0.0
    """The learning rate at the end of the decay, as a share of `learning_rate`."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    checkpoint_interval: Annotated[int, Field(ge=0)] = 50
    """Iterations between checkpoints; 0 keeps none."""
    export_interval: Annotated[int, Field(ge=0)] = 0
    """Iterations between exports of the policy in the Hugging Face layout, to `policies/N` in the run's folder, all of
    which are kept; 0 exports it at the end alone, to `policy`."""
    profile_interval: Annotated[int, Field(ge=0)] = 0
    """Iterations between traces of a step by torch's profiler, one of each rank, to `profiles/` in the run's folder; 0
    writes none. Above 0, NCCL's flight recorder also writes its latest collectives there if one times out."""
    timeout_s: Seconds = 1800.0
    """How long one step, one checkpoint or sending new weights to the generators may take; a transfer to one generator
    may take a quarter of it."""
    num_threads: Count = 1
    """CPU threads of the trainer's process."""
