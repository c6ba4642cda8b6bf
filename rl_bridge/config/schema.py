"""The configuration of a run. Every key is used; an unknown one is refused with its nearest neighbour."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run may be called: the name of one folder, nothing that leads elsewhere."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AlgorithmConfig(Section):
    """`algorithm.*`: what the loss is. `algorithm: grpo` is short for `algorithm: {name: grpo}`."""

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """How far below 1 a probability ratio may fall before its gradient stops."""
    clip_high: Positive = 0.28
    """How far above 1 it may rise ("clip-higher")."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO); false is Dr. GRPO."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How token losses become one number; see rl_bridge.algorithms.aggregation."""
    entropy_coef: NonNegative = 0.0
    """Bonus for the policy's entropy, in units of advantage per nat."""
    entropy_hold: Fraction = 1.0
    """The share of the run for which the bonus stays as it is; afterwards it falls linearly."""
    entropy_final_factor: Fraction = 1.0
    """What is left of the bonus at the end, as a share of `entropy_coef`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the initial policy; above 0 a reference model is started."""


class ModelConfig(Section):
    """`model.*`: the policy's checkpoint."""

    path: str | None = None
    """A folder in the Hugging Face layout. Where it is absent, the task makes a policy of its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the forward pass and the generator compute in. Master weights are float32 either way."""
    thinking: bool = False
    """Whether chat templates that know `enable_thinking` (Qwen3's does) let the policy think before it answers."""


class EnvConfig(Section):
    """`env.*`: the environment server. Exactly one of `app` and `url` is given."""

    app: str | None = None
    """An ASGI application to serve from a local process, as `package.module:name`."""
    url: str | None = None
    """The address of a server that already runs."""
    sessions: Count = 128
    """Episodes in flight: one WebSocket session each."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Options sent with every reset, beside the seed."""
    message_timeout_s: Positive = 30.0
    """How long one reset or step may take."""

    @model_validator(mode="after")
    def _seeds_are_the_runs(self) -> Self:
        if "seed" in self.reset:
            raise ValueError("expected env.reset without a seed: every episode has its own; use seed=N")
        return self

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.app is None) == (self.url is None):
            raise ValueError(
                "expected exactly one of env.app (serve it from a local process) and env.url (use a running server)"
            )
        return self


class RolloutConfig(Section):
    """`rollout.*`: how trajectories are collected."""

    task: str
    """What ties the run to its environment, as `package.module:Class`; a subclass of rl_bridge.rollout.Task."""
    batch_size: Count = 512
    """Trajectories an iteration; a multiple of `group_size`."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Siblings that share a seed."""
    num_turns: Count = 32
    """Exchanges a trajectory at most."""
    max_new_tokens: Count = 16
    """Tokens an answer at most."""
    max_length: Annotated[int, Field(ge=2)] = 4096
    """Prompt and answer together at most, in tokens."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Of the sampling; the trainer divides its logits by the same number. vLLM raises lower ones to 0.01."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many updates old the weights behind a training sample may be."""
    max_attempts: Count = 3
    """How often an episode is tried again in a fresh session after a failure that is not the policy's."""
    timeout_s: Positive = 600.0
    """How long the collection of one batch may take, all told."""
    max_num_seqs: Count = 256
    """Prompts the engine works on at once."""
    kv_cache_mb: Count = 256
    """Memory for the engine's key-value cache, in MiB, on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of a GPU's memory for the engine; the trainer may live on the same GPU."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(
                f"expected rollout.batch_size to be a multiple of rollout.group_size, "
                f"got {self.batch_size} and {self.group_size}"
            )
        if self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"expected rollout.max_new_tokens below rollout.max_length, "
                f"got {self.max_new_tokens} and {self.max_length}"
            )
        return self


class TrainerConfig(Section):
    """`trainer.*`: the optimisation."""

    iterations: Count = 100
    """How often the loop collects, trains and synchronises."""
    updates_per_iteration: Count = 1
    """Optimizer steps an iteration; the batch is split evenly between them, by trajectory."""
    micro_batch_size: Count = 16
    """Distinct rows a forward pass; smaller takes less memory and gives the same gradient. Logits alone take
    rows x length x vocabulary x 4 bytes: 16 rows of 128 tokens and Qwen3's vocabulary are 1.2 GB."""
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
    """How long one step, one checkpoint or the way of new weights to the generator may take."""
    num_threads: Count = 1
    """CPU threads of the trainer's process."""


class RewardConfig(Section):
    """`reward.*`: what is added to the environment's own rewards."""

    illegal_answer: float = -1.0
    """The reward of an answer that is no legal action. It ends the episode."""


class EvaluationConfig(Section):
    """`evaluation.*`: how the policy is looked at."""

    interval: Annotated[int, Field(ge=0)] = 10
    """Iterations between two probes of the greedy policy by the task; 0 probes at the end alone."""
    episodes: Annotated[int, Field(ge=0)] = 10_000
    """Held-out episodes that the greedy policy plays at the end, with seeds that training never uses."""


class Config(Section):
    """A whole run."""

    name: str = Field(default="run", min_length=1, pattern=NAME_PATTERN)
    """The run's folder is `<output_dir>/<name>-<date>-<time>`; `--name` names it exactly."""
    output_dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides the initial weights where the task makes them, the deals, and the sampling's generator. Two runs
    of one seed still differ: which prompts share a batch is a matter of timing."""
    env: EnvConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _a_trajectory_an_update(self) -> Self:
        if self.trainer.updates_per_iteration > self.rollout.batch_size:
            raise ValueError(
                f"expected trainer.updates_per_iteration to be at most rollout.batch_size, "
                f"got {self.trainer.updates_per_iteration} and {self.rollout.batch_size}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _algorithm_by_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("algorithm"), str):
            return {**data, "algorithm": {"name": data["algorithm"]}}
        return data
