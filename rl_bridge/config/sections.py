"""Base class and types of the sections; the small ones: `generator.*`, `reward.*`, `records.*`, `metrics.*`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]
"""At most 31 years: from nine times that, Python's own waits raise an OverflowError."""
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Sampling = Literal["uniform", "sequential", "signal"]
"""How tasks are assigned to groups; see `rl_bridge.data.sampling`."""


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def with_defaults(self, **values: Any) -> Self:
        """Return the section with new values for keys that were not set."""
        unset = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return self.model_copy(update=unset)


EngineKind = Literal["auto", "vllm", "vllm_async"]


DECIDED_ENGINE_OPTIONS = frozenset(
    {
        "async_scheduling",
        "disable_log_stats",
        "distributed_executor_backend",
        "dtype",
        "enable_lora",
        "enable_sleep_mode",
        "logprobs_mode",
        "max_loras",
        "max_lora_rank",
        "max_model_len",
        "max_num_seqs",
        "model",
        "seed",
        "skip_tokenizer_init",
        "tensor_parallel_size",
        "worker_extension_cls",
    }
)
"""Arguments of vLLM's engine that no `generator.options` may set."""


class GeneratorConfig(Section):
    """`generator.*`: the inference engine. Its replicas are `monarch.roles.policy`."""

    engine: EngineKind = "auto"
    """`vllm`: vLLM's engine within the replica's process. `vllm_async`: its AsyncLLM, whose engine has a process of its
    own. `auto`: vllm_async on one GPU, vllm on a CPU and on several GPUs."""
    tensor_parallel: Count = 1
    """GPUs per replica that share each layer: vLLM's tensor parallelism, with a process for each GPU."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine (`EngineArgs`) by their names, handed through as they are; they take the place
    of those that follow from other keys."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if decided := sorted(DECIDED_ENGINE_OPTIONS & self.options.keys()):
            raise ValueError(
                f"expected generator.options without {', '.join(decided)}, which the run decides by other keys, or "
                "needs as they are"
            )
        return self

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> Self:
        if self.tensor_parallel > 1 and self.engine == "vllm_async":
            raise ValueError(
                "expected generator.engine of auto or vllm with generator.tensor_parallel, got vllm_async: of that "
                "engine the processes of several ranks could outlive their replica"
            )
        return self


class RecordsConfig(Section):
    """`records.*`: what `ropewalk rollouts` shows."""

    groups: Annotated[int, Field(ge=0)] = 2
    """Groups of every iteration that are recorded whole, drawn at random; 0 records none."""
    max_mb: Count = 64
    """MiB of the run's folder that they may take; then the oldest are dropped, except for the first eighth."""


class MetricsConfig(Section):
    """`metrics.*`: where each iteration's metrics go, in addition to `metrics.jsonl` and the console."""

    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """TensorBoard's event files, Weights & Biases, Trackio."""
    project: str = Field(default="ropewalk", min_length=1)
    """The project in the latter two, where a run is named after its folder."""


class RewardConfig(Section):
    """`reward.*`: rewards that are added to the environment's own."""

    illegal_answer: float = -1.0
    """The reward of an answer that is not a legal action, or that the environment refuses. It ends the episode."""
    function: Annotated[
        str | tuple[str, ...], BeforeValidator(lambda value: () if value is None else value)
    ] = ()
    """The dotted path of a function `(prompt, response, target) -> float | None`, or several that vote. Its reward is
    added to the environment's; answers to a dataset's prompts are rewarded by it alone. null is none."""
    rule: Literal["mean", "majority"] = "mean"
    """How votes become a reward."""
    quorum: Fraction = 0.5
    """The share of the functions that has to vote; with less the answer has no reward, and is left out."""
    timeout_seconds: Seconds = 10.0
    """How long a function may take. One that takes longer is killed with everything it started, and votes None."""
    start_timeout_seconds: Seconds = 60.0
    """How long importing the functions may take, in each of their processes."""
    workers: Count = 2
    """Processes that call functions, in each replica of monarch.roles.reward."""
    drop_failures: bool = False
    """Whether a function that raises votes None and is counted; if false, it ends the run."""
    model: str | None = None
    """A reward model instead of functions: a checkpoint for sequence classification with one label."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.function and self.model is not None:
            raise ValueError(
                "expected reward.function or reward.model, got both; a function may ask a model itself"
            )
        return self

    @property
    def functions(self) -> tuple[str, ...]:
        """The dotted paths of the functions that vote; empty with a model, or without rewards."""
        return (self.function,) if isinstance(self.function, str) else self.function
