"""What the inference engine is started with."""

from dataclasses import dataclass
from typing import Literal

from rl_bridge.config.generator import EngineKind, GeneratorConfig
from rl_bridge.errors import ConfigError
from rl_bridge.types import SamplingSettings

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For a role's environment: roles take turns, and idle OpenMP threads that spin cost more than they compute."""


def engine_environment(*, on_gpu: bool) -> dict[str, str]:
    """The variables that the engine's process begins with; vLLM reads them when it is imported."""
    environment = {**ONE_THREAD, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if not on_gpu:
        # Compilation takes longer than it saves on models that fit a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return environment


DEFAULT_SAMPLING = SamplingSettings(temperature=1.0, max_new_tokens=128)

WeightUpdate = Literal["drain", "continue"]
"""How an engine takes new weights: after answering what it was asked for before, or in the middle of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OpenAiEndpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: Up to and with `/v1`.
        model: What the server calls it.
        key_variable: The environment variable that holds its key; None where it asks for none.
    """

    url: str
    model: str
    key_variable: str | None = None


def endpoint_of(generator: GeneratorConfig) -> OpenAiEndpoint | None:
    """The server that the configuration names; None of an engine of our own."""
    if generator.url is None or generator.model is None:
        return None
    return OpenAiEndpoint(
        url=generator.url.rstrip("/"), model=generator.model, key_variable=generator.key_variable
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSettings:
    """See `rl_bridge.config.ModelConfig` and `RolloutConfig` for the meaning of fields not named here.

    Attributes:
        engine: What answers; see `GeneratorConfig`.
        endpoint: The server behind the engine `openai`; None of the others.
        sampling: How prompts are answered whose sender does not say.
        weight_update: How new weights are taken; see `VllmEngine.load`.
        timeout_s: What is not answered within so many seconds is given up.
        deterministic: Compute each request by itself, without batches and cached prefixes, so that a seed decides
            an answer to the last bit of its log-probabilities. Slower. Otherwise those bits may depend on what
            else is in a batch: on a CPU and with one thread not for models of a few million parameters, but in
            the last bits for one of 100 million.

    Raises:
        ConfigError: Answers shall be deterministic, and interrupted or a server's; or the engine does not go with
            the endpoint.
    """

    model_path: str
    dtype: str
    max_length: int
    max_num_seqs: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    seed: int
    engine: EngineKind = "vllm"
    endpoint: OpenAiEndpoint | None = None
    sampling: SamplingSettings = DEFAULT_SAMPLING
    weight_update: WeightUpdate = "drain"
    timeout_s: float = 300.0
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.deterministic and self.weight_update == "continue":
            raise ConfigError(
                'expected weight_update "drain" of a deterministic engine, got "continue": when an answer is '
                "interrupted is a matter of timing"
            )
        if (self.engine == "openai") != (self.endpoint is not None):
            raise ConfigError(
                f"expected an endpoint with the engine openai alone, got {self.engine} and {self.endpoint}"
            )
        if self.deterministic and self.engine == "openai":
            raise ConfigError(
                "expected an engine of the run's own with deterministic, got openai: what a server answers depends on "
                "what else it is asked"
            )
