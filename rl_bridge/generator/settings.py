"""What the inference engine is started with."""

from dataclasses import dataclass

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For a role's environment: roles take turns, and idle OpenMP threads that spin cost more than they compute."""


def engine_environment(*, on_gpu: bool) -> dict[str, str]:
    """The variables that the engine's process begins with; vLLM reads them when it is imported."""
    environment = {**ONE_THREAD, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if not on_gpu:
        # Compilation takes longer than it saves on models that fit a CPU.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return environment


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSettings:
    """See `rl_bridge.config.ModelConfig` and `RolloutConfig` for the meaning of each field."""

    model_path: str
    dtype: str
    max_length: int
    max_num_seqs: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    seed: int
