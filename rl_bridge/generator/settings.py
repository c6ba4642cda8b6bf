"""What the inference engine is started with."""

from dataclasses import dataclass


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
