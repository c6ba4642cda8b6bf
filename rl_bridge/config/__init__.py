"""One typed schema for a training run, read from YAML with dotted overrides."""

from rl_bridge.config.loading import load_config, resolve
from rl_bridge.config.schema import (
    AlgorithmConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "EnvConfig",
    "EvaluationConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "load_config",
    "resolve",
]
