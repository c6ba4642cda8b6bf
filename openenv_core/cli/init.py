"""`ropewalk init`: makes a new environment, complete and working."""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_core.cli.command import Command
from openenv_core.errors import ConfigurationError
from openenv_core.manifest import MANIFEST

if TYPE_CHECKING:
    from openenv_core.scaffold.names import EnvironmentNames


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    from openenv_core.scaffold.making import TEMPLATES

    parser.add_argument(
        "name",
        metavar="NAME",
        help="the environment's name: dice makes dice.py with a class Dice; with --package dice, dice_env and dice-env "
        "all make dice_env, with a class DiceEnv",
    )
    parser.add_argument(
        "--package", action="store_true", help="make a folder: a package with a client, an image and a README"
    )
    parser.add_argument(
        "--template",
        metavar="|".join(TEMPLATES),
        help="template of a package; "
        + "; ".join(f"{name}: {description}" for name, description in TEMPLATES.items())
        + " (game)",
    )
    parser.add_argument(
        "--task",
        action="store_true",
        help="also make a task and a run's YAML file, to train a policy on it; for an existing environment, make only "
        "these",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the files, and print the next steps.

    Raises:
        ConfigurationError: The name is invalid, or the file or folder exists.
    """
    from openenv_core.scaffold.names import names_of

    is_package = arguments.package or arguments.template is not None
    names = names_of(arguments.name, package=is_package)
    file = f"{names.short}.py"
    if arguments.task and not is_package:
        is_package = Path(names.package, MANIFEST).is_file() and not Path(file).is_file()
    return _make_package(arguments, names) if is_package else _make_file(arguments, names, file)


def _make_file(arguments: argparse.Namespace, names: "EnvironmentNames", file: str) -> int:
    from openenv_core.scaffold.making import make_file, make_file_task

    if not (arguments.task and Path(file).is_file()):
        made = [path.name for path in make_file(names)]
        print(f"{', '.join(made)}: an environment, class {names.prefix}, and its test.\n")
        train = {f"ropewalk train --env {file} model.path=FOLDER": "train a language model on it"}
        _print_steps(_steps(file, made[1], names) | train)
    if arguments.task:
        _print_task(make_file_task(names), "", " model.path=FOLDER")
    return 0


def _steps(target: str, tests: str, names: "EnvironmentNames") -> dict[str, str]:
    """Return what to do with a new environment: commands, with what they do."""
    return {
        f"ropewalk play {target}": "play it in the terminal",
        f"ropewalk serve {target} --reload": "serve it; restarts after every change",
        f"pytest {tests}".rstrip(): "run all checks as tests",
        f"ropewalk validate {target}": "run the checks; failures say what to change",
        f"ropewalk build {target}": f"build the image {names.image}:latest",
    }


def _print_steps(steps: Mapping[str, str]) -> None:
    width = max(map(len, steps)) + 3
    for command, reason in steps.items():
        print(f"  {command:<{width}}{reason}".rstrip())


def _make_package(arguments: argparse.Namespace, names: "EnvironmentNames") -> int:
    from openenv_core.scaffold.making import TEMPLATES, make, make_task

    template = arguments.template or "game"
    if arguments.task and template != "game":
        raise ConfigurationError(
            f"expected --task with --template game, got {template}; environments of tools need no task, and "
            "docs/tutorials/train.md shows how another one is written"
        )
    if arguments.task and Path(names.package, MANIFEST).is_file():
        _print_task(make_task(names))
        return 0
    folder = make(names, template)
    files = sum(path.is_file() for path in folder.rglob("*"))
    steps = {f"cd {folder.name}": ""}
    if template == "gymnasium" and find_spec("gymnasium") is None:
        steps["pip install gymnasium"] = "which it wraps"
    image = {f"ropewalk validate {names.image}:latest": "check the image"}
    print(f"{folder.name}: {TEMPLATES[template]}; {files} files, class {names.prefix}Env.\n")
    _print_steps(steps | _steps(".", "", names) | image)
    if arguments.task:
        _print_task(make_task(names))
    print(f"\nThe rules are in {Path('server') / 'environment.py'}, the models on the wire in models.py.")
    return 0


def _print_task(
    files: list[Path],
    hint: str = " To train a policy here, in two minutes on two cores:",
    overrides: str = "",
) -> None:
    run, task = sorted(file.name for file in files)  # NAME.yaml, NAME_task.py
    print(f"\n{task}, {run}: a task and a run's configuration.{hint}\n")
    print(f"  ropewalk train --config {run}{overrides}")


COMMAND = Command(
    name="init",
    help="make a new environment, complete and working: a file, or a package",
    configure=configure,
    run=run,
    examples=(
        "ropewalk init dice",
        "ropewalk init dice --task",
        "ropewalk init dice --package",
        "ropewalk init word-search --template tools",
        "ropewalk init cart --template gymnasium",
    ),
)
