"""`ropewalk init`: a new environment, complete and working."""

import argparse
import os
import shlex
from importlib.util import find_spec
from pathlib import Path

from openenv_core.cli.command import Command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    from openenv_core.scaffold.making import TEMPLATES

    parser.add_argument(
        "name",
        metavar="NAME",
        help="what it is called: dice, dice_env and dice-env all make dice_env, with a class DiceEnv",
    )
    parser.add_argument(
        "--template",
        default="game",
        metavar="|".join(TEMPLATES),
        help="; ".join(f"{name}: {what}" for name, what in TEMPLATES.items()) + " (%(default)s)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="PATH",
        help="where its folder is made; the working directory by default",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the folder, and say what to do next.

    Raises:
        ConfigurationError: It cannot be called that, or it is there already.
    """
    from openenv_core.scaffold.making import TEMPLATES, make
    from openenv_core.scaffold.names import names_of

    names = names_of(arguments.name)
    folder = make(names, arguments.template, arguments.dir)
    files = sum(path.is_file() for path in folder.rglob("*"))
    shown = os.path.relpath(folder)
    image = f"{names.image}:latest"
    steps = {
        f"cd {shlex.quote(shown)}": "",
        **({"pip install gymnasium": "what it wraps"} if _lacks_gymnasium(arguments.template) else {}),
        "ropewalk play .": "step it here",
        "ropewalk serve . --reload": "serve it, anew after every change",
        "pytest": "its tests, every property of the checker among them",
        "ropewalk validate .": "the checker by itself",
        "ropewalk build .": f"the image {image}",
        f"ropewalk validate {image}": "the checker against the image",
    }
    width = max(map(len, steps)) + 3
    print(f"{shown}: {TEMPLATES[arguments.template]}; {files} files, class {names.prefix}Env.\n")
    for command, why in steps.items():
        print(f"  {command:<{width}}{why}".rstrip())
    print(f"\nThe rules are in {Path('server') / 'environment.py'}, what crosses the wire is in models.py.")
    return 0


def _lacks_gymnasium(template: str) -> bool:
    return template == "gymnasium" and find_spec("gymnasium") is None


COMMAND = Command(
    name="init",
    help="make a new environment, complete and working",
    configure=configure,
    run=run,
    examples=(
        "ropewalk init dice",
        "ropewalk init word-search --template tools",
        "ropewalk init cart --template gymnasium --dir games",
    ),
)
