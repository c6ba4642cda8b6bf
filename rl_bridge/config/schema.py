"""The configuration of a run. Unknown keys are refused, with the closest known one as a suggestion."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from rl_bridge.config.algorithm import AlgorithmConfig
from rl_bridge.config.environment import EnvConfig, Envs
from rl_bridge.config.monarch import (
    Dtype,
    MonarchConfig,
    ReplicaRange,
    derive_monarch,
    resolve_dtype,
)
from rl_bridge.config.rollout import RolloutConfig
from rl_bridge.config.sections import (
    Count,
    GeneratorConfig,
    MetricsConfig,
    Positive,
    RecordsConfig,
    RewardConfig,
    Sampling,
    Section,
)
from rl_bridge.config.self_play import (
    FROZEN,
    SelfPlayConfig,
    is_checkpoint,
    require_siblings,
)
from rl_bridge.config.trainer import ParallelConfig, TrainerConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""A run's name: a single folder's, so that it cannot lead elsewhere."""
EPISODES_ON_GPUS = 500
"""Held-out episodes with GPUs by default: the mean of so many rewards of 0 or 1 is accurate to 0.045."""
TOOL_WORLD_TASK = "rl_bridge.rollout.tool_task:ToolWorldTask"
SCHEMA_TASK = "rl_bridge.rollout.schema_task:SchemaTask"
"""The tasks of runs that name none: of an environment in a Python file, and of any other."""


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(Section):
    """`model.lora.*`: train low-rank adapters beside frozen weights. `model.lora: {}` takes the defaults.

    A layer computes W x + alpha / rank B A x, arXiv 2106.09685. There is no dropout: the engine samples without it, so
    the trainer's probabilities would differ.
    """

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rows of A, columns of B. vLLM supports at most 512."""
    alpha: Positive = 32.0
    """The product B A is multiplied by alpha / rank."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = LORA_TARGETS
    """The layers with an adapter, by their names in checkpoints; by default all of attention and feed-forward."""
    push: Literal["adapter", "merged"] = "adapter"
    """What generators are sent: only A and B, which vLLM applies beside W, or whole weights W + alpha / rank B A. In
    bfloat16 the sum drops what is smaller than the last bit of W, so most of the first updates."""


class ModelConfig(Section):
    """`model.*`: the policy's checkpoint."""

    path: str | None = None
    """A folder in the Hugging Face layout. Without it, the task makes a policy of its own."""
    dtype: Dtype = "auto"
    """What trainer, reference and generators compute in, and weights are sent in: bfloat16 (short bf16) or float32
    (fp32). auto is bfloat16 if trainer or generators have GPUs, and float32 otherwise. The trainer's master weights,
    gradients and moments are always float32."""
    lora: LoraConfig | None = None
    """None trains all weights."""
    thinking: bool = False
    """Whether chat templates with `enable_thinking` (such as Qwen3's) let the policy think before it answers."""
    tool_calls: Literal["auto", "hermes", "llama", "xml"] = "auto"
    """How the policy writes tool calls; auto detects it from the chat template."""
    repair_tool_calls: bool = False
    """Whether a call in almost valid JSON is repaired. Otherwise it ends its episode and is penalised."""


class DataConfig(Section):
    """`data.*`: prompts to answer, instead of an environment to play."""

    source: str
    """A file of JSON lines (`prompt`, optionally `target` and `id`), or the dotted path of an iterable."""
    sampling: Sampling = "uniform"
    """How groups choose examples: in passes over all of them, shuffled (uniform) or in the source's order (sequential),
    or preferring examples whose recent groups had siblings below the best of their group (signal)."""


class EvaluationConfig(Section):
    """`evaluation.*`: how the policy is evaluated."""

    interval: Annotated[int, Field(ge=0)] = 10
    """Iterations between the task's probes of the greedy policy; 0 probes only at the end."""
    episodes: Annotated[int, Field(ge=0)] = 10_000
    """Held-out episodes that the greedy policy plays at the end, with seeds that training never uses. If generators
    have GPUs, the default is 500."""
    curve_interval: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations on held-out tasks, whose results are metrics (`held_out/*`), also of the last
    iteration; 0 makes none. The loop waits for them."""
    curve_tasks: Count = 64
    """Held-out tasks of each of these, the same every time: the first of those that are played at the end."""
    repetitions: Count = 1
    """How often each of these tasks is played: greedily if once, otherwise sampled at `rollout.temperature`."""
    success: float | None = None
    """The least reward of a success, for `held_out/pass@k`; None is any reward above 0."""


class Config(Section):
    """A whole run. Defaults that depend on other keys are filled in during validation; it is immutable afterwards."""

    name: str = Field(default="run", min_length=1, pattern=NAME_PATTERN)
    """The run's folder is `<output_dir>/<name>-<date>-<time>`; `--name` names it exactly."""
    output_dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Determines the initial weights if the task makes them, the environments' seeds, and the sampling's generator. Two
    runs with one seed still differ, unless `deterministic` is set: which prompts share a batch depends on timing."""
    deterministic: bool = False
    """Every completion has its own seed, and batches a fixed order: runs with the same seed are bitwise equal, even if
    killed and resumed. Requires a `rollout.max_staleness` of 0."""
    env: Envs | None = None
    """One environment to play, or several by name: `env: {blackjack: {app: ..., weight: 3}, shop: {app: ...}}`."""
    data: DataConfig | None = None
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    model: ModelConfig = ModelConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    self_play: SelfPlayConfig = SelfPlayConfig()
    metrics: MetricsConfig = MetricsConfig()
    records: RecordsConfig = RecordsConfig()
    monarch: MonarchConfig = MonarchConfig()

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """The environments by name; a single one in `env` has the name "". Empty for a run on a dataset."""
        if self.env is None:
            return {}
        return {"": self.env} if isinstance(self.env, EnvConfig) else self.env

    @property
    def environment(self) -> EnvConfig:
        """The environment of a run on a single one; ValueError otherwise, where `of` selects one."""
        if not isinstance(self.env, EnvConfig):
            raise ValueError(
                f"expected a run on one environment, got {len(self.environments)}; use Config.of"
            )
        return self.env

    def of(self, name: str) -> Self:
        """Return the configuration of a run on one of the `environments` alone."""
        env = self.environments[name]
        rollout = self.rollout.model_copy(update={"task": env.task or self.rollout.task})
        return self.model_copy(update={"env": env, "rollout": rollout})

    @property
    def reference_parallel(self) -> ParallelConfig:
        """How the ranks of a replica of the reference share its weights: like the trainer's, in one copy."""
        parallel = self.trainer.parallel
        if self.monarch.roles.reference.ranks == 1:
            return ParallelConfig()
        return ParallelConfig(tp=parallel.tp, ep=parallel.ep)

    @property
    def _opponent_sources(self) -> set[str]:
        players = {player for env in self.environments.values() for player in env.players.values()}
        return {player for player in players if player == FROZEN or is_checkpoint(player)}

    @property
    def opponent_source(self) -> str | None:
        """Who plays seats in training with weights of its own: `frozen`, or a checkpoint's folder; None: nobody."""
        return next(iter(self._opponent_sources), None)

    @property
    def has_opponent(self) -> bool:
        """Whether a generator plays opponents, in training or in the cross-table."""
        if self.opponent_source is not None:
            return True
        has_table = self.self_play.deals and any(env.seats for env in self.environments.values())
        others = self.self_play.pool_interval or any(map(is_checkpoint, self.self_play.opponents))
        return bool(has_table and others)

    @property
    def has_reference(self) -> bool:
        """Whether there is a separate reference model; with LoRA the trainer serves as one, its adapters off."""
        return self.algorithm.kl_coef > 0 and self.model.lora is None

    @property
    def call_timeout_s(self) -> float:
        """How long an episode may make no progress; colocated, the trainer's turn may come in between."""
        return self.rollout.timeout_s + (self.trainer.timeout_s if self.monarch.colocate else 0.0)

    @property
    def stall_timeout_s(self) -> float:
        """How long no episode at all may make progress before a run ends: what is lost was then tried once more."""
        return 2 * self.call_timeout_s

    @property
    def pushed_adapter(self) -> LoraConfig | None:
        """The adapters that generators are sent; None if they are sent whole weights."""
        lora = self.model.lora
        return lora if lora is not None and lora.push == "adapter" else None

    @model_validator(mode="after")
    def _fill_weight_update(self) -> Self:
        if self.rollout.max_staleness:
            self._set_derived(rollout=self.rollout.with_defaults(weight_update="continue"))
        if self.pushed_adapter is not None and self.rollout.weight_update == "keep_cache":
            raise ValueError(
                'expected rollout.weight_update of "drain" or "continue" with model.lora.push=adapter, got '
                '"keep_cache": answers in progress keep their adapters, and each adapter has keys and values of its own'
            )
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Refuse conflicts; a source may still be missing, which `require_trainable` checks."""
        if self.env is not None and self.data is not None:
            raise ValueError(
                "expected one of env (an environment to play: env.app, env.image or env.url) and data (prompts to "
                "answer: data.source), got both"
            )
        if self.data is not None and not (self.reward.function or self.reward.model):
            raise ValueError("expected reward.function or reward.model with data, got neither")
        if self.data is not None and self.rollout.agent is not None:
            raise ValueError(
                "expected no rollout.agent with data: an agent plays an environment of tools (env.*)"
            )
        return self

    @model_validator(mode="after")
    def _check_seats(self) -> Self:
        for env in self.environments.values():
            if env.seats and self.rollout.agent is not None:
                raise ValueError("expected no rollout.agent with env.seats: an agent plays one seat")
            if env.seats:
                require_siblings(env.seatings, self.rollout.group_size)
        if len(sources := self._opponent_sources) > 1:
            raise ValueError(
                f"expected one opponent with weights of its own in env.seats, got {', '.join(sorted(sources))}: one "
                "generator plays them"
            )
        return self

    @model_validator(mode="after")
    def _fill_task(self) -> Self:
        if self.env is not None and self.rollout.task is None:
            files = [str(env.app).partition(":")[0].endswith(".py") for env in self.environments.values()]
            task = SCHEMA_TASK if all(files) else TOOL_WORLD_TASK
            object.__setattr__(self, "rollout", self.rollout.model_copy(update={"task": task}))
        return self

    @property
    def shares_prefixes(self) -> bool:
        """Whether passes of trainer and reference may compute once what several rows begin with.

        In bfloat16 GPUs have a kernel for separate rows, and a shared token's gradients would be summed with few
        digits. A compiled model takes one shape of mask.
        """
        return self.trainer.share_prefixes and self.model.dtype == "float32" and not self.trainer.compile

    @model_validator(mode="after")
    def _derive_from_gpus(self) -> Self:
        """Fill unset keys from the role table, and that from `trainer.num_gpus` if set.

        Trainer and generators share one dtype: weights are sent in it, and their probabilities are compared.
        """
        rollout, num_gpus = self.rollout, self.trainer.num_gpus
        if num_gpus is not None:
            workers = rollout.min_workers if "num_workers" in rollout.model_fields_set else None
            monarch = derive_monarch(
                num_gpus,
                self.monarch,
                num_workers=workers,
                reference=self.has_reference,
                opponent=self.has_opponent,
                tensor_parallel=self.generator.tensor_parallel,
            )
            self._set_derived(monarch=monarch)
        trainer, policy = self.monarch.roles.trainer, self.monarch.roles.policy
        dtype = resolve_dtype(self.model.dtype, trainer.gpus + policy.gpus)
        self._set_derived(model=self.model.model_copy(update={"dtype": dtype}))
        if not trainer.gpus and self.trainer.activation_checkpointing == "auto":
            self._set_derived(trainer=self.trainer.model_copy(update={"activation_checkpointing": "none"}))
        environments = self.environments
        if policy.gpus and environments:
            in_flight = (1 + rollout.max_staleness) * rollout.batch_size
            sessions = max(1, min(policy.min_replicas * rollout.max_num_seqs, in_flight) // len(environments))
            derived = {name: env.with_defaults(sessions=sessions) for name, env in environments.items()}
            object.__setattr__(self, "env", derived if isinstance(self.env, dict) else derived[""])
            self._set_derived(
                rollout=rollout.with_defaults(num_workers=policy.replicas),
                evaluation=self.evaluation.with_defaults(episodes=EPISODES_ON_GPUS),
            )
        return self

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.self_play.table_interval and self.rollout.max_staleness and self.has_opponent:
            raise ValueError(
                "expected self_play.table_interval of 0 with a rollout.max_staleness above 0, got "
                f"{self.self_play.table_interval} and {self.rollout.max_staleness}: games of training that are in "
                "flight would meet the opponents of the table; there is one at the end"
            )
        return self

    @model_validator(mode="after")
    def _check_generator_gpus(self) -> Self:
        if (gpus := self.monarch.roles.policy.gpus) not in (0, degree := self.generator.tensor_parallel):
            raise ValueError(
                f"expected monarch.roles.policy.gpus to be 0 or generator.tensor_parallel, {degree}, got {gpus}"
            )
        return self

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if not self.monarch.colocate:
            return self
        policy, trainer, rollout = self.monarch.roles.policy, self.monarch.roles.trainer, self.rollout
        if self.has_opponent:
            raise ValueError("expected no monarch.colocate with opponents that have weights of their own")
        if self.monarch.join_port is not None:
            raise ValueError(
                "expected no monarch.join_port with monarch.colocate: hosts that join have no trainer"
            )
        if policy.min_replicas * policy.gpus != trainer.gpus:
            raise ValueError(
                f"expected generators with as many GPUs as the trainer with monarch.colocate, {trainer.gpus}, got "
                f"{policy.min_replicas} with {policy.gpus} each; change monarch.roles.policy, or set "
                "monarch.colocate=false"
            )
        if rollout.weight_update == "keep_cache":
            raise ValueError(
                'expected rollout.weight_update of "drain" or "continue" with monarch.colocate, got "keep_cache": keys '
                "and values are dropped for the trainer's turn"
            )
        if rollout.max_staleness and rollout.weight_update == "drain":
            raise ValueError(
                f"expected rollout.weight_update=continue with monarch.colocate and rollout.max_staleness of "
                f"{rollout.max_staleness}, got drain: no episode is played while the trainer works, so a step would "
                "wait for the longest answers for nothing; leave it out, or set rollout.max_staleness=0"
            )
        if rollout.max_staleness and rollout.episode_timeout_s is not None:
            raise ValueError(
                "expected no rollout.episode_timeout_s with monarch.colocate and rollout.max_staleness above 0: the "
                "trainer's turn would count; use rollout.num_turns"
            )
        return self

    def _set_derived(self, **sections: Section) -> None:
        for name, section in sections.items():
            object.__setattr__(self, name, section)

    def decided_by_gpus(self) -> dict[str, Any]:
        """Return the keys whose defaults depend on the GPUs, with their values."""
        decided = {
            "model.dtype": self.model.dtype,
            "trainer.activation_checkpointing": self.trainer.activation_checkpointing,
            "monarch.roles.policy.replicas": self.monarch.roles.policy.min_replicas,
        }
        if not self.environments:  # which the other keys are about; the file may still lack it
            return decided
        return decided | {
            "rollout.num_workers": self.rollout.min_workers,
            "env.sessions": sum(env.sessions for env in self.environments.values()),
            "evaluation.episodes": self.evaluation.episodes,
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        roles = self.monarch.roles
        growing = (
            self.rollout.num_workers,
            *(each.replicas for each in (roles.policy, roles.reference, roles.reward)),
        )
        if self.monarch.join_port is None and any(isinstance(each, ReplicaRange) for each in growing):
            raise ValueError(
                "expected monarch.join_port with replicas as {min, max}, which grow with hosts that join"
            )
        self.trainer.parallel.require_ranks(roles.trainer.ranks)
        self.reference_parallel.require_ranks(roles.reference.ranks, role="reference")
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                f"expected rollout.max_staleness of 0 with deterministic, got {self.rollout.max_staleness}: "
                "which weights an episode meets would be a matter of timing"
            )
        if self.deterministic and self.rollout.episode_timeout_s is not None:
            raise ValueError(
                "expected no rollout.episode_timeout_s with deterministic: where an episode ends would be a matter of "
                "timing; use rollout.num_turns"
            )
        if self.deterministic and (update := self.rollout.weight_update) != "drain":
            raise ValueError(
                f'expected rollout.weight_update "drain" with deterministic, got "{update}": when an answer is '
                "interrupted is a matter of timing"
            )
        if self.trainer.updates_per_iteration > self.rollout.batch_size:
            raise ValueError(
                f"expected trainer.updates_per_iteration to be at most rollout.batch_size, "
                f"got {self.trainer.updates_per_iteration} and {self.rollout.batch_size}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _read_algorithm(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("algorithm"), str):
            return {**data, "algorithm": {"name": data["algorithm"]}}
        return data
