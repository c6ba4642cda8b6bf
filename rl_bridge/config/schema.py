"""The configuration of a run. Every key is used; an unknown one is refused with its nearest neighbour."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_bridge.config.monarch import MonarchConfig
from rl_bridge.config.section import Count, Fraction, NonNegative, Positive, Section

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run may be called: the name of one folder, nothing that leads elsewhere."""


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
    """`env.*`: the environment's servers. Exactly one of `app`, `image` and `url` is given."""

    app: str | None = None
    """An ASGI application to serve from processes of this machine, as `package.module:name`."""
    image: str | None = None
    """A Docker image to serve from containers of this machine."""
    url: str | tuple[str, ...] | None = None
    """The address of a server that already runs, or several."""
    sessions: Count = 128
    """Episodes in flight, over all rollout workers: one WebSocket session each."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Options sent with every reset, beside the seed."""
    connect_timeout_s: Positive = 30.0
    """How long the beginning of a session may take."""
    reset_timeout_s: Positive = 30.0
    """How long one reset may take."""
    message_timeout_s: Positive = 30.0
    """How long one step may take."""
    restarts: Annotated[int, Field(ge=0)] = 10
    """How often a server that we started is started again before the run ends."""

    @model_validator(mode="after")
    def _seeds_are_the_runs(self) -> Self:
        if "seed" in self.reset:
            raise ValueError("expected env.reset without a seed: every episode has its own; use seed=N")
        return self

    @model_validator(mode="after")
    def _one_kind_of_server(self) -> Self:
        if sum(given is not None for given in (self.app, self.image, self.url)) != 1:
            raise ValueError(
                "expected exactly one of env.app (serve it from local processes), env.image (from containers) "
                "and env.url (use running servers)"
            )
        return self


class DataConfig(Section):
    """`data.*`: prompts to answer, instead of an environment to play."""

    source: str
    """A file of JSON lines (`prompt`, and if there are `target` and `id`), or the dotted path of an iterable."""
    shuffle: bool = True
    """Whether every epoch has an order of its own, drawn from the run's seed."""


class RolloutConfig(Section):
    """`rollout.*`: how trajectories are collected."""

    task: str | None = None
    """What ties the run to its environment, as `package.module:Class`; a subclass of rl_bridge.rollout.Task."""
    num_workers: Count = 1
    """Processes that play episodes; each has an equal share of `env.sessions`."""
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
    """How many updates old the weights behind a training sample may be. 0 is the synchronous loop: collect, train,
    synchronise. Above 0 episodes go on being played while the trainer works."""
    weight_update: Literal["drain", "continue"] = "drain"
    """How generators take new weights: finish what they have been asked first, or go on with it under the new ones."""
    min_group_size: Annotated[int, Field(ge=2)] = 2
    """Siblings with which a group is trained where others were lost or late. With fewer it is dropped."""
    straggler_timeout_s: Positive = 600.0
    """How long a batch waits for a group that would be too stale for the next one. After that the group goes with the
    siblings that are there, or is dropped."""
    max_attempts: Count = 3
    """How often an episode, or a group whose worker was lost, is tried again after a failure not the policy's."""
    spot_eligible: bool = False
    """Rollout workers may be taken away at any time: their loss is not charged to the restart budget."""
    checkpoint_on_preemption: bool = False
    """A worker that is told to go (SIGTERM) hands back the episodes that it has finished; and a run that is told to
    go writes a checkpoint before it ends."""
    generate_timeout_s: Positive = 300.0
    """How long one answer of the policy may take, other replicas' attempts included."""
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
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"expected rollout.min_group_size of at most rollout.group_size, "
                f"got {self.min_group_size} and {self.group_size}"
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
    """How long one step, one checkpoint or the way of new weights to the generator may take."""
    num_threads: Count = 1
    """CPU threads of the trainer's process."""


class RewardConfig(Section):
    """`reward.*`: what is added to the environment's own rewards."""

    illegal_answer: float = -1.0
    """The reward of an answer that is no legal action. It ends the episode."""
    function: str | tuple[str, ...] = ()
    """The dotted path of a function `(prompt, response, target) -> float | None`, or several that vote. What it gives
    an episode is added to what the environment gave; answers to a dataset's prompts are rewarded by it alone."""
    weights: tuple[Positive, ...] = ()
    """Of the votes, one a function; all equal where there are none."""
    rule: Literal["mean", "majority", "min"] = "mean"
    """How votes become a reward."""
    quorum: Fraction = 0.5
    """The share of the weight that has to have voted; with less the answer has no reward, and is left out."""
    timeout_seconds: Positive = 10.0
    """How long a function may take. One that takes longer is killed with all that it started, and votes None."""
    workers: Count = 2
    """Processes in which functions are called, in each replica of monarch.roles.reward."""
    drop_failures: bool = False
    """A function that raises votes None and is counted; false ends the run."""
    model: str | None = None
    """A reward model instead of functions: a checkpoint for sequence classification with one label."""

    @model_validator(mode="after")
    def _one_kind_of_reward(self) -> Self:
        if self.function and self.model is not None:
            raise ValueError(
                "expected reward.function or reward.model, got both; a function may ask a model itself"
            )
        return self


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
    of one seed still differ, unless `deterministic` is set: which prompts share a batch is a matter of timing."""
    deterministic: bool = False
    """Every completion has a seed of its own, and batches an order: two runs of one seed are equal to the bit, killed
    and resumed or not. Needs `rollout.max_staleness` of 0."""
    env: EnvConfig | None = None
    data: DataConfig | None = None
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monarch: MonarchConfig = MonarchConfig()

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> Self:
        if (self.env is None) == (self.data is None):
            raise ValueError(
                "expected exactly one of env (an environment to play: env.app, env.image or env.url) and data "
                "(prompts to answer: data.source)"
            )
        if self.env is not None and self.rollout.task is None:
            raise ValueError("rollout.task: a value is needed with env, none was given")
        if self.data is not None and not (self.reward.function or self.reward.model):
            raise ValueError("expected reward.function or reward.model with data, got neither")
        return self

    @model_validator(mode="after")
    def _repeatable(self) -> Self:
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                f"expected rollout.max_staleness of 0 with deterministic, got {self.rollout.max_staleness}: "
                "which weights an episode meets would be a matter of timing"
            )
        return self

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
