"""Starts the services of a run."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_bridge.config import Config, MonarchConfig, RoleConfig
from rl_bridge.data.actor import DatasetActor
from rl_bridge.environments.coders import ENVIRONMENT_VARIABLE, coders_file
from rl_bridge.errors import RoleFailed
from rl_bridge.generator.actor import PolicyActor
from rl_bridge.generator.settings import ONE_THREAD, engine_environment
from rl_bridge.loops.settings import (
    dataset_settings,
    engine_settings,
    restart_policy,
    reward_model_settings,
    reward_settings,
    trainer_settings,
    worker_settings,
)
from rl_bridge.reference.actor import ReferenceActor
from rl_bridge.rewards.actor import RewardActor, RewardModelActor
from rl_bridge.rollout.actor import RolloutActor
from rl_bridge.services import BoundOptions, Service, ServiceActor
from rl_bridge.services.placement import by_need
from rl_bridge.trainer.actor import TrainerActor
from rl_bridge.weights import WeightStore

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Roles:
    """The services of a run.

    Attributes:
        policy: Of `PolicyActor`.
        trainer: Of `TrainerActor`: one replica, with a process a rank.
        rollout: Of `RolloutActor`; None of a run on a dataset.
        dataloader: Of `DatasetActor`; None of a run on an environment.
        reference: Of `ReferenceActor`; None where the KL coefficient is 0.
        reward: Of `RewardActor` or `RewardModelActor`; None where the environment's own rewards are all that counts.
    """

    policy: Service
    trainer: Service
    rollout: Service | None
    dataloader: Service | None
    reference: Service | None
    reward: Service | None


async def start_roles(config: Config, folder: Path, model_path: Path, store: WeightStore) -> Roles:
    """Start all services at once; returns when all of them serve. Needs an open fleet.

    Raises:
        rl_bridge.errors.BridgeError: One could not be started.
    """
    _warn_of_idle_gpus(config.monarch)
    coders = {} if config.monarch.roles.coder is None else {ENVIRONMENT_VARIABLE: str(coders_file(folder))}
    table, trainer = config.monarch.roles, trainer_settings(config, folder, model_path)
    engine = engine_environment(on_gpu=table.policy.gpus > 0)
    starting: dict[str, tuple[BoundOptions, tuple[Any, ...]]] = {
        "policy": (
            _of(config, PolicyActor, "policy", table.policy, engine),
            (engine_settings(config, model_path), store),
        ),
        "trainer": (_of(config, TrainerActor, "trainer", table.trainer, ONE_THREAD), (trainer, store)),
    }
    if config.env is not None:
        workers = RoleConfig(replicas=config.rollout.num_workers)
        starting["rollout"] = (
            _of(config, RolloutActor, "rollout", workers, ONE_THREAD | coders),
            (worker_settings(config, folder, model_path),),
        )
    else:
        starting["dataset"] = (
            _of(config, DatasetActor, "dataset", RoleConfig(), ONE_THREAD),
            (dataset_settings(config),),
        )
    if config.algorithm.kl_coef:
        starting["reference"] = (
            _of(config, ReferenceActor, "reference", table.reference, ONE_THREAD),
            (trainer,),
        )
    if config.reward.function:
        starting["reward"] = (
            _of(config, RewardActor, "reward", table.reward, coders),
            (reward_settings(config),),
        )
    elif config.reward.model is not None:
        starting["reward"] = (
            _of(config, RewardModelActor, "reward", table.reward, ONE_THREAD),
            (reward_model_settings(config, config.reward.model),),
        )
    tasks: dict[str, asyncio.Task[Service]] = {}
    longest_s = config.monarch.start_timeout_s
    try:
        async with asyncio.timeout(longest_s), asyncio.TaskGroup() as group:
            # They are given room in the order in which their tasks begin.
            for name in by_need({name: bound.options for name, (bound, _) in starting.items()}):
                bound, args = starting[name]
                tasks[name] = group.create_task(bound.as_service(*args))
    except TimeoutError:
        raise RoleFailed(
            f"expected {', '.join(starting)} to be ready within {longest_s:g} s, they are not; "
            f"see the logs in {folder / 'logs'}, or raise monarch.start_timeout_s"
        ) from None
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several
    started = {name: task.result() for name, task in tasks.items()}
    return Roles(
        policy=started["policy"],
        trainer=started["trainer"],
        rollout=started.get("rollout"),
        dataloader=started.get("dataset"),
        reference=started.get("reference"),
        reward=started.get("reward"),
    )


def _warn_of_idle_gpus(monarch: MonarchConfig) -> None:
    there, used = monarch.num_nodes * monarch.gpus_per_node, monarch.roles.gpus()
    if there > used:
        logger.warning(
            "the cluster has %d GPUs (monarch.num_nodes x gpus_per_node), monarch.roles use %d; the others are idle",
            there,
            used,
        )


def _of(
    config: Config, actor: type[ServiceActor], name: str, role: RoleConfig, environment: dict[str, str]
) -> BoundOptions:
    return actor.options(
        procs=role.procs,
        hosts=role.hosts,
        with_gpus=role.gpus > 0,
        num_replicas=role.replicas,
        name=name,
        environment=environment,
        restarts=restart_policy(config.monarch),
        start_timeout_s=config.monarch.start_timeout_s,
    )
