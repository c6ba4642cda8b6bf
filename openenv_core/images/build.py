"""Builds the image of an environment: finds its Dockerfile, its base image and its tags."""

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images import base
from openenv_core.images.dockerfile import (
    BASE_ARG,
    OUR_BASE,
    OUR_BASE_BUILDS,
    PLACES,
    RELEASED_BASE,
    Dockerfile,
)
from openenv_core.images.engine import BuildRequest, build_image, replace_tags
from openenv_core.images.ignore_rules import find_context_secrets
from openenv_core.manifest import MANIFEST, ManifestError, read_keys

if TYPE_CHECKING:
    import docker

PREDEFINED_ARGS: Final = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
"""Build arguments that every Dockerfile accepts without an ARG."""

ENVIRONMENT: Final = "ropewalk.environment"
"""The label with the environment's name."""

_NAME = re.compile(r"[\w.-]+")
_TAG = re.compile(
    r"(?:(?:localhost|[\w-]+(?:\.[\w-]+)+|[\w-]+(?=:\d))(?::\d+)?/)?"  # a registry's host
    r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?"
)
_RELEASED = re.compile(rf"(^|/){RELEASED_BASE}(:|@|$)")


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The plan of one environment's build.

    Attributes:
        name: The environment's name.
        request: The image to build; its arguments already name the base, even if that must be built first.
        variant: The variant of our base that it uses; None: another base.
        notes: Notes for the user, shown before the build.
    """

    name: str
    request: BuildRequest
    variant: base.Variant | None
    notes: tuple[str, ...]


def plan(
    folder: Path,
    *,
    tags: Sequence[str] = (),
    build_args: Mapping[str, str] | None = None,
    base_image: str | None = None,
    file: str | None = None,
    no_cache: bool = False,
    pull: bool = False,
) -> BuildPlan:
    """Plan the build of a folder's image.

    Args:
        folder: The environment's folder, which is the build context.
        tags: The image's tags; `{name}` stands for the environment's name. By default `NAME-env:latest`.
        build_args: Values for ARGs of the Dockerfile.
        base_image: The base image to use instead of ours.
        file: The Dockerfile, relative to the folder.
        no_cache: Whether to build without the engine's cache.
        pull: Whether to pull newer base images from the registry.

    Raises:
        ConfigurationError: The folder is not an environment, or cannot be built with these arguments.
    """
    path = _dockerfile_of(folder, file)
    if not (folder / MANIFEST).is_file() and (folder.parent / MANIFEST).is_file():
        raise ConfigurationError(
            f"expected an environment's folder, got {folder}, a part of one: COPY would not see the rest; "
            f"build {folder.parent}"
        )
    dockerfile = Dockerfile.read(folder / path)
    if secrets := find_context_secrets(folder):
        raise ConfigurationError(
            f"expected files without secrets, got what may hold one in {', '.join(secrets)}; take it out, or name the "
            "file in .dockerignore"
        )
    notes: list[str] = []
    if not (folder / MANIFEST).is_file():
        notes.append(f"{folder} has no {MANIFEST}: commands that read it will not recognise this environment")
    name = name_of(folder)
    arguments = dict(build_args or {})
    if base_image is not None:
        if BASE_ARG in arguments:
            raise ConfigurationError(f"both --base and --build-arg {BASE_ARG}=... are given; leave one out")
        if not dockerfile.takes_base:
            raise ConfigurationError(
                f"expected a Dockerfile that stands on its ARG {BASE_ARG}, which --base gives a value, got "
                f"FROM {dockerfile.base} in {folder / path}; begin it with `ARG {BASE_ARG}=...` and "
                f"`FROM ${{{BASE_ARG}}}`"
            )
        arguments[BASE_ARG] = base_image
    _refuse_unknown(arguments, dockerfile, folder / path)
    variant = None if BASE_ARG in arguments else variant_for(dockerfile)
    if variant is not None:
        arguments[BASE_ARG] = base.tags(variant)[0]
    return BuildPlan(
        name=name,
        request=BuildRequest(
            context=folder,
            dockerfile=path,
            tags=tuple(complete_tags(tags, name)) or (default_tag(name),),
            build_args=arguments,
            labels={ENVIRONMENT: name},
            no_cache=no_cache,
            # Our base is built on this machine; no registry has it.
            pull=pull and variant is None,
        ),
        variant=variant,
        notes=tuple(notes),
    )


def name_of(folder: Path) -> str:
    """Return the name of a folder's environment, from its manifest or else the folder's name."""
    name = None
    with suppress(ManifestError):
        name = read_keys(folder).get("name")
    return str(name) if name and _NAME.fullmatch(str(name)) else folder.resolve().name


def default_tag(name: str) -> str:
    """Return the default tag of an environment: `blackjack-env:latest` for `blackjack` and `blackjack_env`."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    slug = slug.removesuffix("-env") or slug
    if not slug:
        raise ConfigurationError(f"expected a name that an image can have, got {name!r}; give one with --tag")
    return f"{slug}-env:latest"


def complete_tags(tags: Sequence[str], name: str) -> list[str]:
    """Fill in the environment's name, and `latest` if a version is missing.

    Raises:
        ConfigurationError: A tag is not a valid name of an image.
    """
    completed = []
    for text in tags:
        tag = text.replace("{name}", default_tag(name).partition(":")[0]) if "{name}" in text else text
        match = _TAG.fullmatch(tag)
        if match is None:
            raise ConfigurationError(
                f"expected an image's name such as my-env:1.0 or registry.example.org/team/my-env:1.0, got {tag!r}; "
                "names are in lower case"
            )
        completed.append(tag if match["tag"] else f"{tag}:latest")
    return completed


def variant_for(dockerfile: Dockerfile) -> base.Variant | None:
    """Return the variant of our base that is the default of a Dockerfile's ARG BASE_IMAGE; None if it is none."""
    if not dockerfile.takes_base:
        return None
    default = dockerfile.args[BASE_ARG] or ""
    if _RELEASED.search(default):
        return base.Variant.BUILD
    if default.partition(":")[0] == OUR_BASE:
        return base.Variant.BUILD if default.endswith(OUR_BASE_BUILDS) else base.Variant.RUNTIME
    return None


def read_build_args(arguments: Sequence[str]) -> dict[str, str]:
    """Parse arguments `NAME=VALUE`, or `NAME` for the value of this process's environment variable.

    Raises:
        ConfigurationError: An argument is neither.
    """
    values: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigurationError(f"expected --build-arg NAME=VALUE, got {argument!r}")
        if not equals:
            if name not in os.environ:
                raise ConfigurationError(
                    f"expected --build-arg {name}=VALUE, or a variable {name} in this shell, got neither"
                )
            value = os.environ[name]
        values[name] = value
    return values


def _dockerfile_of(folder: Path, file: str | None) -> str:
    if not folder.is_dir():
        raise ConfigurationError(f"there is no environment's folder at {folder}; check the path")
    if file is not None:
        path = (folder / file).resolve()
        if not path.is_file() or not path.is_relative_to(folder.resolve()):
            raise ConfigurationError(f"expected a Dockerfile inside {folder}, got {file}")
        return path.relative_to(folder.resolve()).as_posix()
    for file_name in PLACES:
        if (folder / file_name).is_file():
            return file_name
    if not (folder / MANIFEST).is_file():
        raise ConfigurationError(
            f"expected an environment's folder, got {folder}, with neither {MANIFEST} nor a Dockerfile; "
            "name the folder that holds them, or make one with `ropewalk init NAME`"
        )
    raise ConfigurationError(
        f"expected a Dockerfile at {' or '.join(PLACES)} of {folder}, got none; `ropewalk init` writes one that "
        "you can copy"
    )


def _refuse_unknown(build_args: Mapping[str, str], dockerfile: Dockerfile, path: Path) -> None:
    known = {*dockerfile.args, *PREDEFINED_ARGS}
    for name in build_args:
        if name not in known:
            near = difflib.get_close_matches(name, dockerfile.args, n=1)
            declared = ", ".join(dockerfile.args) or "none"
            hint = f"did you mean {near[0]}?" if near else f"it has: {declared}"
            raise ConfigurationError(
                f"expected a build argument that {path} has an ARG for, got {name}; {hint}"
            )


def build(api: "docker.APIClient", build_plan: BuildPlan) -> str:
    """Build an environment's image and return its id; docker's output goes to standard error.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: The command `docker` is not installed.
    """
    for note in build_plan.notes:
        sys.stderr.write(f"note: {note}\n")
    if build_plan.variant is not None:
        base.ensure(api, build_plan.variant)
    with replace_tags(api, build_plan.request.tags):
        return build_image(build_plan.request)


def refuse_same_tags(plans: Sequence[tuple[str, BuildPlan | None]]) -> None:
    """Raise a ConfigurationError if two environments of one command would have the same tag."""
    owners: dict[str, str] = {}
    for target, build_plan in plans:
        for tag in build_plan.request.tags if build_plan is not None else ():
            if owners.setdefault(tag, target) != target:
                raise ConfigurationError(
                    f"expected environments with different names, got {owners[tag]} and {target}, which both "
                    f"become {tag}; build them one by one with --tag"
                )
