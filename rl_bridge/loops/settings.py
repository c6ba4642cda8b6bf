"""From the configuration to what each role is started with."""

from pathlib import Path

from rl_bridge.algorithms.functions import load_group_filter
from rl_bridge.config import Config
from rl_bridge.config.algorithm import WITHOUT_VARIANCE
from rl_bridge.environments.servers import EnvironmentServers, OnChange
from rl_bridge.rollout.assignment import EpisodeSettings
from rl_bridge.rollout.dispatcher import DispatchSettings
from rl_bridge.rollout.groups import GroupFilter, Overlong, PlayedEnvironment
from rl_bridge.rollout.task import task_type
from rl_bridge.trainer.settings import TrainerSettings


def trainer_settings(config: Config, folder: Path, model_path: Path) -> TrainerSettings:
    """What every rank of the trainer is started with; the reference model too."""
    return TrainerSettings(
        model_path=str(model_path),
        dtype=config.model.dtype,
        folder=str(folder.absolute()),
        max_length=config.rollout.max_length,
        max_loss_tokens=greatest_length(config),
        temperature=config.rollout.temperature,
        seed=config.seed,
        trainer=config.trainer,
        algorithm=config.algorithm,
        lora=config.model.lora,
        deterministic=config.deterministic,
        colocated=bool(config.monarch.colocate),
    )


def environment_servers(
    config: Config, name: str, on_change: OnChange, logs: Path | None = None
) -> EnvironmentServers:
    """The servers of an environment, not started yet. Their output goes into `logs`, where that is given."""
    env = config.environments[name]
    return EnvironmentServers(
        app=env.app,
        image=env.image,
        urls=env.urls,
        count=config.monarch.roles.environment.replicas,
        restarts=config.monarch.restarts.model_copy(update={"budget": env.restarts}),
        on_change=on_change,
        logs=logs,
        name=environment_role(name),
    )


def environment_role(name: str) -> str:
    """What an environment's servers are called among the processes of a run."""
    return f"environment-{name}" if name else "environment"


def episode_settings(config: Config, environment: str = "", *, temperature: float) -> EpisodeSettings:
    """How an episode is played; a temperature of 0 is greedy."""
    env = config.environments.get(environment)
    return EpisodeSettings(
        temperature=temperature,
        num_turns=config.rollout.num_turns,
        illegal_reward=config.reward.illegal_answer,
        reset_options={} if env is None else env.reset,
        timeout_s=config.rollout.episode_timeout_s,
    )


def dispatch_settings(config: Config, examples: int | None = None) -> DispatchSettings:
    """How the controller gives groups out; `examples` says how many a dataset has."""
    rollout, environments = config.rollout, config.environments
    in_flight = sum(env.sessions for env in environments.values()) or (
        rollout.max_num_seqs * config.monarch.roles.policy.replicas
    )
    return DispatchSettings(
        run_seed=config.seed,
        group_size=rollout.group_size,
        min_group_size=rollout.min_group_size,
        slots=max(1, in_flight // rollout.sessions_a_group),
        environments={
            name: PlayedEnvironment(
                episode=episode_settings(config, name, temperature=rollout.temperature),
                weight=env.weight,
                tasks=env.tasks,
                sampling=env.sampling,
            )
            for name, env in environments.items()
        }
        or {
            "": PlayedEnvironment(
                episode=episode_settings(config, temperature=rollout.temperature),
                tasks=examples,
                sampling="uniform" if config.data is None else config.data.sampling,
            )
        },
        deterministic=config.deterministic,
        timeout_s=config.call_timeout_s,
        max_lost_share=rollout.max_lost_share,
        filter=group_filter(config),
        fork_turn=rollout.fork_turns,
    )


def greatest_length(config: Config) -> int:
    """The most tokens of its own that the policy can put into a trajectory; a dataset's prompt has one answer.

    A chat that grows has one context for all of its answers. Where a task shows another chat in every turn, each answer
    has one of its own, which any answer fits.
    """
    rollout = config.rollout
    turns = rollout.num_turns if config.data is None else 1
    longest = turns * rollout.max_new_tokens
    tasks = {config.of(name).rollout.task for name in config.environments} or {rollout.task}
    grows = (
        task is None or task_type(task).chat_grows for task in tasks
    )  # without one it is a world of tools
    return rollout.max_length if longest > rollout.max_length and all(grows) else longest


def overlong(config: Config) -> Overlong:
    """What is done about trajectories that are too long."""
    algorithm, longest = config.algorithm, greatest_length(config)
    return Overlong(
        handling=algorithm.overlong,
        max_length=longest,
        buffer=max(1, round(algorithm.overlong_share * longest)),
    )


def group_filter(config: Config) -> GroupFilter:
    """Which groups are trained."""
    algorithm = config.algorithm
    path = WITHOUT_VARIANCE if algorithm.dynamic_sampling else algorithm.group_filter
    return GroupFilter(
        function=None if path is None else load_group_filter(path),
        overlong=overlong(config),
        refills=algorithm.max_refills * config.rollout.groups_per_step,
    )
