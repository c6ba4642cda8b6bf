"""`ropewalk push`: pushes images to a registry, or a folder to a Hugging Face Space."""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.cli.command import Command
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.manifest import MANIFEST

if TYPE_CHECKING:
    from openenv_core.images.space import StagedSpace

FAILED: Final = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `push`."""
    add = parser.add_argument
    add(
        "targets",
        nargs="+",
        metavar="IMAGE|PATH",
        help="an image, or an environment's folder or file, which stands for the image that `ropewalk build` makes of "
        "it",
    )
    add(
        "--registry",
        metavar="HOST[:PORT]/NAMESPACE",
        help="push images there, with the credentials stored by `docker login`",
    )
    space = parser.add_argument_group("to a Space of the Hugging Face hub, which builds the image itself")
    space.add_argument("--space", metavar="OWNER/NAME", help="upload the folder there")
    space.add_argument("--private", action="store_true", help="make a new Space private")
    space.add_argument("--dry-run", action="store_true", help="list the files to upload, and upload nothing")


def run(arguments: argparse.Namespace) -> int:
    """Push; return 1 if anything failed.

    Raises:
        ConfigurationError: The arguments are invalid; nothing was pushed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends docker too, like Ctrl-C
    if arguments.space is not None:
        return _push_space(arguments)
    for name in ("private", "dry_run"):
        if getattr(arguments, name):
            raise ConfigurationError(f"expected --{name.replace('_', '-')} with --space OWNER/NAME")
    return _push_images(arguments)


def _push_images(arguments: argparse.Namespace) -> int:
    from openenv_core.images.push import push, remote_name
    from openenv_core.providers.docker.engine import DockerEngine

    images = [_image_of(target) for target in dict.fromkeys(arguments.targets)]
    remotes = [(image, remote_name(image, arguments.registry)) for image in images]
    failed = 0
    engine = DockerEngine.find()
    for image, remote in remotes:
        print(f"{image} -> {remote}", file=sys.stderr)
        try:
            digest = push(engine, image, remote)
        except OpenEnvError as error:
            print(f"ropewalk: {error}", file=sys.stderr)
            failed += 1
        else:
            print(f"{remote}  {digest}")
    if failed and len(remotes) > 1:
        print(f"ropewalk: {failed} of {len(remotes)} did not arrive", file=sys.stderr)
    return FAILED if failed else 0


def _image_of(target: str) -> str:
    """Return the image of a target; for a folder or file, the one that `ropewalk build` makes."""
    from openenv_core.images.build import complete_tags, default_tag, name_of
    from openenv_core.targets import split_path

    path = Path(os.path.expanduser(target))
    if path.is_dir() and (target.startswith((".", "/", "~")) or (path / MANIFEST).is_file()):
        return default_tag(name_of(path.resolve()))
    if (file := split_path(target)[0]).suffix == ".py" and file.is_file():
        return default_tag(file.stem)
    return complete_tags([target], "")[0]


def _push_space(arguments: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from openenv_core.images.engine import PushError
    from openenv_core.images.one_file import staged_folder
    from openenv_core.images.space import check_name, stage, upload
    from openenv_core.targets import target_of

    if arguments.registry is not None:
        raise ConfigurationError("both --registry and --space are given; push twice")
    if len(arguments.targets) != 1:
        raise ConfigurationError(f"expected one folder for a Space, got {len(arguments.targets)}")
    check_name(arguments.space)
    folder = Path(os.path.expanduser(arguments.targets[0])).resolve()
    file = None if folder.is_dir() else target_of(arguments.targets[0]).file
    with ExitStack() as stack:
        temporary = stack.enter_context(TemporaryDirectory(prefix="ropewalk-space-"))
        if file is not None:
            folder = stack.enter_context(staged_folder(*file))
        staged = stage(folder, Path(temporary))
        _print_upload(staged, arguments)
        if arguments.dry_run:
            return 0
        try:
            url = upload(Path(temporary), arguments.space, private=arguments.private)
        except PushError as error:
            print(f"ropewalk: {error}", file=sys.stderr)
            return FAILED
    print(url)
    return 0


def _print_upload(staged: "StagedSpace", arguments: argparse.Namespace) -> None:
    visibility = "private" if arguments.private else "public"
    verb = "would upload" if arguments.dry_run else "uploading"
    size = sum(staged.files.values())
    print(
        f"{verb} {len(staged.files)} files, {size / 1e3:.0f} kB, to the Space {arguments.space} "
        f"({visibility} if it is new, sdk docker, port {staged.port})"
    )
    if arguments.dry_run:
        for name, count in staged.files.items():
            print(f"  {count:>9,}  {name}")
    for name, reason in staged.left_out.items():
        print(f"left out: {name} ({reason})")
    print(
        "note: whoever can see the Space can use it: give it a secret ROPEWALK_TOKENS, or make it --private"
    )


COMMAND: Final = Command(
    name="push",
    help="push images to a registry, or a folder to a Hugging Face Space",
    configure=configure,
    run=run,
    examples=(
        "ropewalk push my_env --registry registry.example.org/team",
        "ropewalk push my-env:1.0 --registry registry.example.org/me",
        "ropewalk push my_env --space me/my-env --dry-run",
    ),
)
