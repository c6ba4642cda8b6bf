"""`trainer.*`: the optimisation."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from rl_bridge.config.section import Count, Fraction, NonNegative, Positive, Section


class TrainerConfig(Section):
    """`trainer.*`: the optimisation."""

    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs that train, a rank each; what `monarch.roles` leaves open follows (see rl_bridge.config.gpus): above 0 each
    generator has a GPU too, 0 is the CPU. Without it the role table says all."""
    iterations: Count = 100
    """How often the loop collects, trains and synchronises."""
    updates_per_iteration: Count = 1
    """Optimizer steps an iteration; the batch is split evenly between them, by trajectory."""
    micro_batch_size: Count = 16
    """Distinct rows a forward pass; smaller takes less memory and gives the same gradient. Logits alone take
    rows x length x vocabulary x 4 bytes: 16 rows of 128 tokens and Qwen3's vocabulary are 1.2 GB."""
    gradient_accumulation_steps: Count = 1
    """Passes forward and backward behind one optimizer step, on every rank, at least; a small `micro_batch_size` makes
    more. The gradient is the same."""
    tensor_parallel: Count = 1
    """Ranks that share each layer; the other ranks of monarch.roles.trainer share the data (FSDP2)."""
    pipeline_parallel: Count = 1
    """Not supported above 1."""
    collective_timeout_s: Positive = 300.0
    """How long ranks wait for each other."""
    learning_rate: Positive = 1e-6
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly to its value."""
    decay_fraction: Fraction = 0.0
    """The last share of the run over which the learning rate falls linearly."""
    final_lr_factor: Fraction = 0.0
    """What is left of the learning rate at the end of the decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    checkpoint_interval: Annotated[int, Field(ge=0)] = 50
    """Iterations between checkpoints; 0 keeps none."""
    timeout_s: Positive = 1800.0
    """How long one step, one checkpoint or the way of new weights to the generators may take; one generator's transfer
    of them a quarter of it."""
    num_threads: Count = 1
    """CPU threads of the trainer's process."""

    @model_validator(mode="after")
    def _layers_together(self) -> Self:
        if self.pipeline_parallel != 1:
            raise ValueError(
                f"expected trainer.pipeline_parallel of 1, got {self.pipeline_parallel}: a model's layers stay "
                "together; spread it over more ranks of monarch.roles.trainer, and by trainer.tensor_parallel"
            )
        return self
