"""Keys without effect because of another key, and checks that a configuration is ready to train."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import websocket_url
from rl_bridge.config.algorithm import AlgorithmConfig
from rl_bridge.config.environment import EnvConfig, env_key
from rl_bridge.config.schema import Config
from rl_bridge.config.sections import Section
from rl_bridge.config.self_play import SelfPlayConfig
from rl_bridge.errors import ConfigError

Condition = tuple[str, Callable[[AlgorithmConfig], bool]]
"""What a key requires: a description, and whether it is met."""

_RATIO: Condition = ("algorithm.objective is clip or cispo", lambda config: config.objective != "reinforce")
_ENTROPY_DECAY: Condition = (
    "algorithm.entropy_coef is above 0, and entropy_final_factor and entropy_hold below 1",
    lambda config: config.entropy_coef > 0 and config.entropy_final_factor < 1 and config.entropy_hold < 1,
)
_KL: Condition = ("algorithm.kl_coef is above 0", lambda config: config.kl_coef > 0)
_TRUNCATED: Condition = ("algorithm.correction is truncated", lambda config: config.correction == "truncated")
_WEIGHT_LIMIT: Condition = (
    "algorithm.correction is icepop or decoupled",
    lambda config: config.correction in ("icepop", "decoupled"),
)
_ICEPOP: Condition = ("algorithm.correction is icepop", lambda config: config.correction == "icepop")
_CRITIC: Condition = ("algorithm.advantage is gae", lambda config: config.advantage == "gae")

CONDITIONS: Final[Mapping[str, Condition]] = MappingProxyType(
    {
        "clip_low": _RATIO,
        "clip_high": _RATIO,
        "dual_clip": ("algorithm.objective is clip", lambda config: config.objective == "clip"),
        "entropy_top_k": ("algorithm.entropy_coef is above 0", lambda config: config.entropy_coef > 0),
        "entropy_hold": _ENTROPY_DECAY,
        "entropy_final_factor": _ENTROPY_DECAY,
        "kl_estimator": _KL,
        "kl_in": _KL,
        "correction_cap": _TRUNCATED,
        "correction_low": _ICEPOP,
        "correction_high": _WEIGHT_LIMIT,
        "max_refills": (
            "algorithm.dynamic_sampling is true, or algorithm.group_filter is set",
            lambda config: config.dynamic_sampling or config.group_filter is not None,
        ),
        "overlong_share": ("algorithm.overlong is penalty", lambda config: config.overlong == "penalty"),
        "gamma": _CRITIC,
        "gae_lambda": _CRITIC,
        "value_clip": _CRITIC,
        "critic_learning_rate": _CRITIC,
    }
)
"""Keys of `algorithm.*` that only have an effect together with another. Invalid combinations are refused elsewhere."""


EPISODE_KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "rollout": ("num_turns", "episode_timeout_s", "cut_answer"),
        "reward": ("illegal_answer",),
        "evaluation": ("episodes", "curve_interval", "curve_tasks", "repetitions", "success"),
    }
)
"""Keys of each section that only apply to environments: a dataset's prompt has one answer, which no environment can
refuse, and no prompts are held out."""

ANSWER_KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"rollout": ("cut_answer",), "reward": ("illegal_answer",)}
)
"""Keys of each section that only apply to our own dialogue, which ends at an answer that means no action."""


def find_unused_keys(config: Config) -> list[str]:
    """Return a line for each key that was set without effect; values from presets and defaults do not count."""
    lines = find_unused_algorithm_keys(config.algorithm)
    if isinstance(config.env, EnvConfig) and config.env.weight != 1:
        lines.append(
            f"env.weight={config.env.weight} has no effect: it only counts if env has several by name"
        )
    groups = config.trainer.iterations * config.rollout.groups_per_step
    for key, env in ((env_key(name, "sampling"), env) for name, env in config.environments.items()):
        if env.sampling == "signal" and env.tasks is not None and env.tasks >= groups:
            lines.append(
                f"{key}=signal has no effect: {groups} groups come back to none of {env.tasks} tasks"
            )
    if config.data is not None:
        lines += _find_unused(config, EPISODE_KEYS, "env.* is set, not data.*")
    elif config.rollout.agent is not None:
        lines += _find_unused(config, ANSWER_KEYS, "rollout.agent is not set: an agent decides what follows")
    if not (evaluation := config.evaluation).curve_interval:
        lines += [
            f"evaluation.{key}={getattr(evaluation, key)} has no effect: it only counts if evaluation.curve_interval "
            "is above 0"
            for key in ("curve_tasks", "repetitions", "success")
            if getattr(evaluation, key) != type(evaluation).model_fields[key].default
        ]
    if config.self_play != SelfPlayConfig() and not any(env.seats for env in config.environments.values()):
        lines.append("self_play.* has no effect: it only counts if env.seats names the seats of a game")
    if config.rollout.checkpoint_on_preemption and not config.trainer.checkpoint_interval:
        lines.append(
            "rollout.checkpoint_on_preemption=True has no effect on the run: trainer.checkpoint_interval=0 keeps no "
            "checkpoint"
        )
    if config.model.lora is not None and "reference" in config.monarch.roles.model_fields_set:
        lines.append(
            "monarch.roles.reference has no effect: with model.lora the reference is the trainer's model, adapters off"
        )
    return lines


def find_unused_algorithm_keys(algorithm: AlgorithmConfig) -> list[str]:
    """Return the lines for `algorithm.*`."""
    defaults = AlgorithmConfig(name=algorithm.name)
    return [
        f"algorithm.{key}={getattr(algorithm, key)} has no effect: it only counts if {condition}"
        for key, (condition, is_met) in CONDITIONS.items()
        if getattr(algorithm, key) != getattr(defaults, key) and not is_met(algorithm)
    ]


def _find_unused(config: Config, keys: Mapping[str, tuple[str, ...]], condition: str) -> list[str]:
    """Return the lines for keys, by section, that are not at their defaults, and whose condition is not met."""
    sections: list[tuple[str, Section]] = [(name, getattr(config, name)) for name in keys]
    return [
        f"{name}.{key}={getattr(section, key)} has no effect: it only counts if {condition}"
        for name, section in sections
        for key in keys[name]
        if getattr(section, key) != type(section).model_fields[key].default
    ]


def require_trainable(config: Config) -> None:
    """Raise ConfigError, listing every fault, if the configuration is valid but cannot be trained."""
    checks = (
        *(
            _check_source(config),
            _check_urls(config),
            _check_hosts(config),
            _check_shared_gpus(config),
        ),
        *map(_check_sink, config.metrics.sinks),
    )
    faults = [fault for fault in checks if fault is not None]
    if faults:
        raise ConfigError("this configuration is not ready to train:\n  " + "\n  ".join(faults))


def _check_source(config: Config) -> str | None:
    if len(config.environments) > 1 and config.model.path is None:
        return (
            "expected model.path with several environments, a checkpoint in the Hugging Face layout, got none: a task "
            "that makes a policy makes one for its own environment"
        )
    if config.env is not None or config.data is not None:
        return None
    return (
        "expected env.* (an environment to play: env.app, env.image or env.url) or data.* (a dataset of prompts to "
        "answer: data.source), got neither"
    )


def _check_urls(config: Config) -> str | None:
    for name, env in config.environments.items():
        for url in env.urls:
            try:
                websocket_url(url)
            except ConfigurationError as error:
                return f"{env_key(name, 'url')}: {error}"
    return None


def _check_sink(sink: str) -> str | None:
    if find_spec(sink) is not None:
        return None
    extra = "rl-common" if sink == "tensorboard" else sink
    return f"metrics.sinks: expected the package {sink!r} to be installed, it is not; pip install 'ropewalk[{extra}]'"


def _check_shared_gpus(config: Config) -> str | None:
    monarch = config.monarch
    trainer, policy = monarch.roles.trainer.gpus, monarch.roles.policy.gpus
    if monarch.transport != "cuda_ipc" or (monarch.colocate and 0 < trainer <= policy):
        return None
    return (
        "expected monarch.colocate=true and generators that each have all of the trainer's GPUs with "
        f"monarch.transport=cuda_ipc, got colocate={monarch.colocate}, {trainer} GPUs of the trainer and {policy} of a "
        "generator; shared_memory needs none of it"
    )


def _check_hosts(config: Config) -> str | None:
    monarch = config.monarch
    if monarch.num_nodes == 1 or monarch.job is not None or len(monarch.workers) >= monarch.num_nodes:
        return None
    return (
        f"expected monarch.workers with the addresses of {monarch.num_nodes} hosts (monarch.num_nodes), or "
        f"monarch.job, which asks a scheduler for them, got {len(monarch.workers)} addresses; "
        "monarch.num_nodes=1 is this machine alone"
    )
