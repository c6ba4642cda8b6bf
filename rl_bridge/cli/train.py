"""`ropewalk train`: one run, from a configuration to a report."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import add_overrides, overrides_first_class, with_exit_status
from rl_bridge.errors import ConfigError

if TYPE_CHECKING:
    from rl_bridge.config import Config


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="the run's YAML file")
    source.add_argument(
        "--env",
        metavar="FILE.py",
        help="an environment in one file, in place of a YAML file; give the policy by model.path=FOLDER",
    )
    source.add_argument(
        "--resume", metavar="FOLDER", help="resume the run in this folder from its newest checkpoint"
    )
    parser.add_argument("--seed", type=int, help="short for seed=N")
    parser.add_argument(
        "--name", help="the run's folder in output_dir; default: the file's name and the time"
    )
    add_overrides(parser)


@with_exit_status("train")
def run(arguments: argparse.Namespace) -> int:
    """Train; returns the exit status: 0, 1 if the run failed, 2 for a bad command line, 130 on Ctrl-C."""
    config, folder = _prepare(arguments)
    from rl_bridge.config.effects import find_unused_keys
    from rl_bridge.rollout.preflight import run_preflight

    for line in find_unused_keys(config):  # before other output could bury the warnings
        print(f"ropewalk train: warning: {line}", file=sys.stderr)

    run_preflight(config)
    # Imported only now: faults of the command line and the configuration show before the heavy stack loads.
    from rl_bridge.loops.session import train_run

    return train_run(config, folder, resume=arguments.resume is not None)


def _prepare(arguments: argparse.Namespace) -> "tuple[Config, Path]":
    from rl_bridge.config import (
        load_config,
        load_env_config,
        load_saved_config,
        make_folder_exists_error,
        require_name,
        require_trainable,
    )
    from rl_bridge.loops.folder_lock import is_unused

    overrides = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.resume is not None:
        if arguments.name is not None:
            raise ConfigError("expected --name with a new run alone; a run that goes on keeps its folder")
        folder = Path(arguments.resume)
        config = load_saved_config(folder, overrides)
        require_trainable(config)
        _require_same_run(load_saved_config(folder), config)
        return config, folder
    config = (
        load_config(arguments.config, overrides)
        if arguments.env is None
        else load_env_config(arguments.env, overrides)
    )
    require_trainable(config)
    require_name(arguments.name, kind="runs")
    name = arguments.name or f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.output_dir) / name
    if not is_unused(folder):
        raise make_folder_exists_error(folder)
    return config, folder


def _require_same_run(saved: "Config", resumed: "Config") -> None:
    """Refuse changes that would make a resumed run a different one, whose weights its report would misdescribe."""
    for key, old, new in (
        ("seed", saved.seed, resumed.seed),
        ("model.path", saved.model.path, resumed.model.path),
        (
            "rollout.task",
            *(
                {name: config.of(name).rollout.task for name in config.environments}
                for config in (saved, resumed)
            ),
        ),
        # A new data.source may be the same file, moved; whether its examples differ is checked when they are read.
        ("data.sampling", saved.data and saved.data.sampling, resumed.data and resumed.data.sampling),
        (
            "env.tasks and env.sampling",
            *(
                {name: (env.tasks, env.sampling) for name, env in config.environments.items()}
                for config in (saved, resumed)
            ),
        ),
        # It decides whether checkpoints contain a critic.
        ("algorithm.advantage", saved.algorithm.advantage, resumed.algorithm.advantage),
    ):
        if old != new:
            raise ConfigError(
                f"expected {key} as the run began with, {old!r}, got {new!r}; start a new run to change it"
            )


COMMAND = Command(
    name="train",
    help="train a policy on an environment, from a YAML file or the environment's own file",
    configure=configure,
    run=run,
    reword=overrides_first_class,
    examples=(
        "ropewalk train --env dice.py model.path=SmolLM2-135M-Instruct",
        "ropewalk train --config examples/grpo_blackjack/config.yaml",
        "ropewalk train --config examples/grpo_blackjack/config.yaml --seed 7 --name seven",
        "ropewalk train --config examples/grpo_blackjack/config.yaml algorithm.kl_coef=0.01 rollout.group_size=8",
        "ropewalk train --config cluster.yaml --monarch.num_nodes 8 --trainer.num_gpus 2",
        "ropewalk train --resume runs/seven",
    ),
)
