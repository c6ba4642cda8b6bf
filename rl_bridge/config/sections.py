"""What parts of the configuration are made of; `generator.*`, `trainer.*`, `reward.*`, `records.*`, `metrics.*`."""

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]
"""31 years at most: with more than nine times that, Python's own waits raise an OverflowError when they begin."""
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Sampling = Literal["uniform", "sequential", "signal"]
"""How groups are given tasks: `rl_bridge.data.sampling`."""


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def with_defaults(self, **values: Any) -> Self:
        """Return the section with other defaults for keys that are not set."""
        unset = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return self.model_copy(update=unset)


EngineKind = Literal["auto", "vllm", "vllm_async", "openai"]


class GeneratorConfig(Section):
    """`generator.*`: what answers prompts. Replicas of it are `monarch.roles.policy`."""

    engine: EngineKind = "auto"
    """`vllm`: vLLM's engine within the replica's process. `vllm_async`: its AsyncLLM, whose engine has a process of its
    own beside the replica's. `auto`: vllm_async on one GPU, vllm on a CPU and on several GPUs. `openai`: a server that
    already runs; its weights cannot be updated, so it can be evaluated and not trained."""
    tensor_parallel: Count = 1
    """GPUs of a replica, which share each layer: vLLM's tensor parallelism, a process each beside the replica's."""
    url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Where an OpenAI-compatible server is, up to and with `/v1`. It has to return token ids (vLLM's does)."""
    model: str | None = Field(default=None, min_length=1)
    """What that server calls the model. `model.path` is the folder of the same model's tokenizer."""
    key_variable: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the server's key; with none no key is sent. The key itself belongs into no
    file: configurations are saved with runs."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            valid = False
        if not valid or parts.username is not None or parts.query or parts.fragment:
            # Not repeated here: who writes a key into it does not want it in a log.
            raise ValueError(
                "expected generator.url as http://HOST:PORT/v1, got something else, or more: what lets in is the key "
                "in the environment variable that generator.key_variable names, never a part of the address"
            )
        return url.rstrip("/")

    @field_validator("key_variable")
    @classmethod
    def _check_key_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                "expected generator.key_variable to be the name of an environment variable, got something that is no "
                "such name; the key itself belongs into the variable"
            )
        return name

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.engine == "openai":
            if self.url is None or self.model is None:
                raise ValueError(
                    "expected generator.url and generator.model with generator.engine=openai, "
                    f"got {self.url!r} and {self.model!r}"
                )
        elif (self.url, self.model, self.key_variable) != (None, None, None):
            raise ValueError(
                "expected generator.url, generator.model and generator.key_variable with generator.engine=openai "
                f"alone, got them with {self.engine}"
            )
        if self.tensor_parallel > 1 and self.engine in ("vllm_async", "openai"):
            raise ValueError(
                f"expected generator.engine of auto or vllm with generator.tensor_parallel, got {self.engine}: of that "
                "engine the processes of several ranks could outlive their replica, or are not ours"
            )
        return self

    def find_training_obstacle(self) -> str | None:
        """Why this cannot be trained; None where it can."""
        if self.engine != "openai":
            return None
        return (
            f"expected generator.engine of vllm or vllm_async, got openai: the weights of the server at {self.url} "
            "cannot be updated, so every answer would come from a policy that does not learn; "
            "ropewalk eval looks at it"
        )


Checkpointing = Literal["auto", "none", "selective", "full"]


class TrainerConfig(Section):
    """`trainer.*`: the optimisation."""

    num_gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs that train, a rank each; what `monarch.roles` leaves open follows (see rl_bridge.config.monarch): above 0
    generators get the GPUs that are left, 0 is the CPU. Without it the role table says all."""
    iterations: Count = 100
    """How often the loop collects, trains and synchronises."""
    updates_per_iteration: Count = 1
    """Optimizer steps an iteration; the batch is split evenly between them, by trajectory."""
    tokens_per_pass: Count = 16_384
    """Tokens of distinct rows that go through the model at once on each rank; `rollout.max_length`, if that is more.
    Fewer take less memory and give the same gradient."""
    tokens_per_chunk: Count = 1024
    """Loss tokens that have logits at once, in trainer and reference: 2 x tokens x vocabulary x 4 bytes, 1.2 GB with
    Qwen3's vocabulary. The result is the same."""
    gradient_accumulation_steps: Count = 1
    """Passes forward and backward behind one optimizer step, on every rank, at least; a small `tokens_per_pass` makes
    more. The gradient is the same."""
    activation_checkpointing: Checkpointing = "auto"
    """What the backward pass computes anew in place of keeping it, in policy and critic: nothing, all of a block but
    attention and every second product of matrices, or all of it. `auto`: as little as the GPU has room for, by what
    `ropewalk plan` works out (docs/training.md); nothing on a CPU. The gradient is the same."""
    compile: bool = False
    """Whether the blocks of policy and critic are compiled by torch.compile. It needs a C++ compiler on every host of
    the trainer, and takes its time in the first iterations."""
    tensor_parallel: Count = 1
    """Ranks that share each layer; the other ranks of monarch.roles.trainer share the data (FSDP2)."""
    pipeline_parallel: Literal[1] = 1
    """A model's layers stay together: spread it by `tensor_parallel`, and over more ranks of monarch.roles.trainer."""
    collective_timeout_s: Seconds = 300.0
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
    timeout_s: Seconds = 1800.0
    """How long one step, one checkpoint or the way of new weights to the generators may take; one generator's transfer
    of them a quarter of it."""
    num_threads: Count = 1
    """CPU threads of the trainer's process."""


class RecordsConfig(Section):
    """`records.*`: what `ropewalk rollouts` shows."""

    groups: Annotated[int, Field(ge=0)] = 2
    """Groups of every iteration that are kept whole, drawn at random; 0 keeps none."""
    max_mb: Count = 64
    """MiB of the run's folder that they may take. The first eighth stays; then the oldest ones go."""


class MetricsConfig(Section):
    """`metrics.*`: where the metrics of each iteration go, beside `metrics.jsonl` and the console."""

    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """TensorBoard's event files, Weights & Biases, Trackio."""
    project: str = Field(default="ropewalk", min_length=1)
    """The project of the latter two; a run is called after its folder there."""


class RewardConfig(Section):
    """`reward.*`: rewards that are added to the environment's own."""

    illegal_answer: float = -1.0
    """The reward of an answer that is no legal action, or that the environment refuses. It ends the episode."""
    function: Annotated[
        str | tuple[str, ...], BeforeValidator(lambda value: () if value is None else value)
    ] = ()
    """The dotted path of a function `(prompt, response, target) -> float | None`, or several that vote. What it gives
    an episode is added to what the environment gave; answers to a dataset's prompts are rewarded by it alone. null is
    none."""
    weights: tuple[Positive, ...] = ()
    """Of the votes, one a function; all equal where there are none."""
    rule: Literal["mean", "majority", "min"] = "mean"
    """How votes become a reward."""
    quorum: Fraction = 0.5
    """The share of the weight that has to have voted; with less the answer has no reward, and is left out."""
    timeout_seconds: Seconds = 10.0
    """How long a function may take. One that takes longer is killed with all that it started, and votes None."""
    start_timeout_seconds: Seconds = 60.0
    """How long the import of the functions may take, in each of their processes."""
    workers: Count = 2
    """Processes in which functions are called, in each replica of monarch.roles.reward."""
    drop_failures: bool = False
    """A function that raises votes None and is counted; false ends the run."""
    model: str | None = None
    """A reward model instead of functions: a checkpoint for sequence classification with one label."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.function and self.model is not None:
            raise ValueError(
                "expected reward.function or reward.model, got both; a function may ask a model itself"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"expected reward.weights with one a function, {len(self.functions)}, got {len(self.weights)}"
            )
        return self

    @property
    def functions(self) -> tuple[str, ...]:
        """The dotted paths of the functions that vote; none where there is a model, or nothing."""
        return (self.function,) if isinstance(self.function, str) else self.function
