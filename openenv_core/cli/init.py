"""`ropewalk init`: makes a new environment, complete and working."""

import argparse
import os
import shlex
from importlib.util import find_spec
from pathlib import Path

from openenv_core.cli.command import Command
from openenv_core.errors import ConfigurationError
from openenv_core.manifest import MANIFEST


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    from openenv_core.scaffold.making import TEMPLATES

    parser.add_argument(
        "name",
        metavar="NAME",
        help="the environment's name: dice, dice_env and dice-env all make dice_env, with a class DiceEnv",
    )
    parser.add_argument(
        "--template",
        default="game",
        metavar="|".join(TEMPLATES),
        help="; ".join(f"{name}: {description}" for name, description in TEMPLATES.items())
        + " (%(default)s)",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="PATH", help="parent of the new folder; by default the working directory"
    )
    parser.add_argument(
        "--task",
        action="store_true",
        help="also make a task and a run's YAML file, to train a tiny policy on the game; for an existing "
        "environment, make only these",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the folder, and print the next steps.

    Raises:
        ConfigurationError: The name is invalid, or the folder exists.
    """
    from openenv_core.scaffold.making import TEMPLATES, make, make_task
    from openenv_core.scaffold.names import names_of

    names = names_of(arguments.name)
    if arguments.task and arguments.template != "game":
        raise ConfigurationError(
            f"expected --task with --template game, got {arguments.template}; environments of tools need no task, and "
            "docs/tutorials/train.md shows how another one is written"
        )
    parent = arguments.dir or Path.cwd()
    if arguments.task and (parent / names.package / MANIFEST).is_file():
        _print_task(make_task(names, parent))
        return 0
    folder = make(names, arguments.template, arguments.dir)
    files = sum(path.is_file() for path in folder.rglob("*"))
    lacks_gymnasium = arguments.template == "gymnasium" and find_spec("gymnasium") is None
    relative = os.path.relpath(folder)
    image = f"{names.image}:latest"
    steps = {
        f"cd {shlex.quote(relative)}": "",
        **({"pip install gymnasium": "which it wraps"} if lacks_gymnasium else {}),
        "ropewalk play .": "play it in the terminal",
        "ropewalk serve . --reload": "serve it; restarts after every change",
        "pytest": "run its tests and all checks",
        "ropewalk validate .": "run only the checks; failures say what to change",
        "ropewalk build .": f"build the image {image}",
        f"ropewalk validate {image}": "check the image",
    }
    width = max(map(len, steps)) + 3
    print(f"{relative}: {TEMPLATES[arguments.template]}; {files} files, class {names.prefix}Env.\n")
    for command, reason in steps.items():
        print(f"  {command:<{width}}{reason}".rstrip())
    if arguments.task:
        _print_task(make_task(names, parent))
    print(f"\nThe rules are in {Path('server') / 'environment.py'}, the models on the wire in models.py.")
    return 0


def _print_task(files: list[Path]) -> None:
    run, task = sorted(files)  # NAME.yaml, NAME_task.py
    folder = os.path.relpath(task.parent)
    names = f"{os.path.relpath(task)}, {os.path.relpath(run)}"
    print(
        f"\n{names}: a task and a run's configuration. To train a policy here, in two minutes on two cores:\n"
    )
    if folder != ".":
        print(f"  cd {shlex.quote(folder)}")
    print(f"  ropewalk train --config {run.name}")


COMMAND = Command(
    name="init",
    help="make a new environment, complete and working",
    configure=configure,
    run=run,
    examples=(
        "ropewalk init dice",
        "ropewalk init dice --task",
        "ropewalk init word-search --template tools",
        "ropewalk init cart --template gymnasium --dir games",
    ),
)
