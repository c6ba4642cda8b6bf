"""`ropewalk build`: container images of environments, and their base image."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.cli.command import Command
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.manifest import MANIFEST

if TYPE_CHECKING:
    from openenv_core.images.build import BuildPlan

BASE: Final = "base"
"""The target that means the base images."""

FAILED: Final = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `build`."""
    add = parser.add_argument
    add(
        "targets",
        nargs="+",
        metavar="PATH|NAME",
        help=f"environments, each a folder, a file or a name; `{BASE}` builds only the base images",
    )
    add(
        "-t",
        "--tag",
        action="append",
        default=[],
        metavar="IMAGE",
        help="the name of the image; may be given several times; {name} in it is replaced, as in "
        "registry.example.org/team/{name}:1.0 (NAME-env:latest)",
    )
    add(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of an ARG of the Dockerfile, such as BASE_IMAGE; NAME alone takes it from this shell",
    )


def run(arguments: argparse.Namespace) -> int:
    """Build all targets; return 1 if any failed.

    Raises:
        ConfigurationError: The arguments are invalid; nothing was built.
        EngineUnavailableError: The engine does not respond.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends docker too, like Ctrl-C
    from openenv_core.images.build import read_build_args
    from openenv_core.providers.docker.engine import DockerEngine

    build_args = read_build_args(arguments.build_arg)
    failures: dict[str, OpenEnvError] = {}
    with ExitStack() as staged:
        plans = _plans(arguments, build_args, staged)
        DockerEngine.find().client()  # raises before anything is built, if there is no engine or no SDK
        for target, build_plan in plans:
            try:
                _build(target, build_plan, build_args)
            except OpenEnvError as error:
                print(f"ropewalk: {target}: {error}", file=sys.stderr)
                failures[target] = error
    if failures and len(plans) > 1:
        print(f"ropewalk: {len(failures)} of {len(plans)} failed: {', '.join(failures)}", file=sys.stderr)
    return FAILED if failures else 0


def _plans(
    arguments: argparse.Namespace, build_args: Mapping[str, str | None], staged: ExitStack
) -> "list[tuple[str, BuildPlan | None]]":
    """Plan all builds before the first starts; None stands for the base. Folders of files are `staged` meanwhile."""
    from openenv_core.images.build import plan, refuse_same_tags

    targets = list(dict.fromkeys(arguments.targets))
    has_several = len(targets) > 1
    if has_several and (fixed_tags := [tag for tag in arguments.tag if "{name}" not in tag]):
        raise ConfigurationError(
            f"expected {{name}} in the tags of several environments, got {fixed_tags[0]!r}; "
            "write --tag 'registry.example.org/team/{name}:1.0'"
        )
    plans: list[tuple[str, BuildPlan | None]] = []
    folders: set[Path] = set()
    for target in targets:
        if target == BASE and not Path(target, MANIFEST).is_file():
            if arguments.tag:
                raise ConfigurationError(
                    f"expected `ropewalk build {BASE}` without --tag; the base's names say its version"
                )
            plans.append((target, None))
            continue
        folder = _folder(target, staged)
        if folder in folders:
            continue  # the same folder in two spellings: `my_env my_env/`
        folders.add(folder)
        plans.append((target, plan(folder, tags=arguments.tag, build_args=build_args)))
    refuse_same_tags(plans)
    return plans


def _folder(target: str, staged: ExitStack) -> Path:
    from openenv_core.images.one_file import staged_folder
    from openenv_core.targets import TargetKind, target_of

    path = Path(os.path.expanduser(target))
    if path.is_dir():
        return path.resolve()
    resolved = target_of(target)
    if resolved.file is not None:
        return staged.enter_context(staged_folder(*resolved.file))
    if resolved.folder is None or resolved.kind not in (TargetKind.PATH, TargetKind.NAME):
        raise ConfigurationError(
            f"expected an environment's folder, file or name, got {target!r}; name the folder that has its openenv.yaml"
        )
    return resolved.folder


def _build(target: str, build_plan: "BuildPlan | None", build_args: Mapping[str, str | None]) -> None:
    from openenv_core.images import base
    from openenv_core.images.build import build

    print(f"{target}:", file=sys.stderr)
    if build_plan is not None:
        image_id = build(build_plan)
        print(f"{' '.join(build_plan.request.tags)}  {image_id.removeprefix('sha256:')[:12]}")
        return
    for variant in base.Variant:
        base.ensure(variant, build_args=build_args)
        print(" ".join(base.tags(variant)))


COMMAND: Final = Command(
    name="build",
    help="build the container images of environments",
    configure=configure,
    run=run,
    examples=(
        "ropewalk build my_env",
        "ropewalk build my_env other_env --tag 'registry.example.org/team/{name}:1.0'",
        "ropewalk build my_env --build-arg BASE_IMAGE=my-base:1 --build-arg VERSION=2",
        "ropewalk build base        # the base images of environments",
    ),
)
