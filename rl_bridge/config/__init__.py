"""One typed schema for a training run, read from YAML with dotted overrides."""

from rl_bridge.config.loading import CONFIG_FILE, load_config, resolve, save_config
from rl_bridge.config.monarch import CoderConfig, MonarchConfig, RoleConfig
from rl_bridge.config.schema import (
    NAME_PATTERN,
    AlgorithmConfig,
    Config,
    DataConfig,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)

__all__ = [
    "CONFIG_FILE",
    "NAME_PATTERN",
    "AlgorithmConfig",
    "CoderConfig",
    "Config",
    "DataConfig",
    "EnvConfig",
    "EvaluationConfig",
    "ModelConfig",
    "MonarchConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "TrainerConfig",
    "load_config",
    "resolve",
    "save_config",
]
