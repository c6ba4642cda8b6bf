"""One typed schema for a training run, read from YAML with dotted overrides."""

from rl_bridge.config.algorithm import PRESETS, AlgorithmConfig
from rl_bridge.config.effects import ready_to_train
from rl_bridge.config.loading import (
    CONFIG_FILE,
    PARTIAL_CONFIG_FILE,
    colocate_if_needed,
    folder_exists,
    load_config,
    load_section,
    require_name,
    resolve,
    resolve_function,
    save_config,
)
from rl_bridge.config.monarch import CoderConfig, MonarchConfig, RoleConfig
from rl_bridge.config.schema import (
    NAME_PATTERN,
    Config,
    DataConfig,
    EnvConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
)
from rl_bridge.config.sections import (
    GeneratorConfig,
    MetricsConfig,
    RecordsConfig,
    RewardConfig,
    TrainerConfig,
)

__all__ = [
    "CONFIG_FILE",
    "NAME_PATTERN",
    "PARTIAL_CONFIG_FILE",
    "PRESETS",
    "AlgorithmConfig",
    "CoderConfig",
    "Config",
    "DataConfig",
    "EnvConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "MonarchConfig",
    "RecordsConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "TrainerConfig",
    "colocate_if_needed",
    "folder_exists",
    "load_config",
    "load_section",
    "ready_to_train",
    "require_name",
    "resolve",
    "resolve_function",
    "save_config",
]
