"""Builds the image of an environment: finds its Dockerfile, its base image and its tags."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.images import base
from openenv_core.images.engine import BuildRequest, build_image
from openenv_core.images.ignore_rules import find_context_secrets
from openenv_core.manifest import MANIFEST, ManifestError, read_keys

PLACES: Final = ("server/Dockerfile", "Dockerfile")
"""Paths of a folder's Dockerfile; the first that exists is used."""

BASE_ARG: Final = "BASE_IMAGE"
"""The ARG with the base image."""

RELEASED_BASE: Final = "openenv-base"
"""The name of the base image of folders made by the released `openenv init`."""

_BASE_DEFAULT = re.compile(rf"(?im)^\s*ARG\s+{BASE_ARG}(?:=(?P<default>\S+))?\s*$")
_BASE_USE = re.compile(rf"(?im)^\s*FROM\s+(?:--\S+\s+)*\$\{{?{BASE_ARG}\b")

ENVIRONMENT: Final = "ropewalk.environment"
"""The label with the environment's name."""

_NAME = re.compile(r"[\w.-]+")
_TAG = re.compile(
    r"(?P<host>(?:localhost|[\w-]+(?:\.[\w-]+)+|[\w-]+(?=:\d)|\[[\da-fA-F:]+\])(?::\d+)?/)?"  # of a registry
    r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?"
)
_RELEASED = re.compile(rf"(^|/){RELEASED_BASE}(:|@|$)")


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The plan of one environment's build.

    Attributes:
        request: The image to build; its arguments already name the base, even if that must be built first.
        variant: The variant of our base that it uses; None: another base.
    """

    request: BuildRequest
    variant: base.Variant | None


def plan(
    folder: Path,
    *,
    tags: Sequence[str] = (),
    build_args: Mapping[str, str | None] | None = None,
) -> BuildPlan:
    """Plan the build of a folder's image.

    Args:
        folder: The environment's folder, which is the build context.
        tags: The image's tags; `{name}` stands for the environment's name. By default `NAME-env:latest`.
        build_args: Values for ARGs of the Dockerfile; BASE_IMAGE is the base image to use instead of ours.

    Raises:
        ConfigurationError: The folder is not an environment, or cannot be built with these arguments.
    """
    path = _dockerfile_of(folder)
    if not (folder / MANIFEST).is_file() and (folder.parent / MANIFEST).is_file():
        raise ConfigurationError(
            f"expected an environment's folder, got {folder}, a part of one: COPY would not see the rest; "
            f"build {folder.parent}"
        )
    default = read_base(read_dockerfile(folder / path))
    if secrets := find_context_secrets(folder):
        raise ConfigurationError(
            f"expected files without secrets, got what may hold one in {', '.join(secrets)}; take it out, or name the "
            "file in .dockerignore"
        )
    name = name_of(folder)
    arguments = dict(build_args or {})
    variant = None if BASE_ARG in arguments else variant_for(default)
    if variant is not None:
        arguments[BASE_ARG] = base.tags(variant)[0]
    return BuildPlan(
        request=BuildRequest(
            context=folder,
            dockerfile=path,
            tags=tuple(complete_tags(tags, name)) or (default_tag(name),),
            build_args=arguments,
            labels={ENVIRONMENT: name},
        ),
        variant=variant,
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


def is_remote(tag: str) -> bool:
    """Whether an image's name begins with the host of a registry."""
    match = _TAG.fullmatch(tag)
    return match is not None and match["host"] is not None


def read_dockerfile(path: Path) -> str:
    """Return the text of a Dockerfile; ConfigurationError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"expected a readable Dockerfile at {path}, got: {error}") from error


def read_base(dockerfile: str) -> str | None:
    """Return the default of a Dockerfile's ARG BASE_IMAGE, "" if it has none; None if no stage is based on that ARG."""
    match = _BASE_DEFAULT.search(dockerfile)
    return (match["default"] or "").strip("\"'") if match and _BASE_USE.search(dockerfile) else None


def variant_for(default: str | None) -> base.Variant | None:
    """Return the variant of our base that an ARG BASE_IMAGE has as its default; None if it is none."""
    if default and _RELEASED.search(default):
        return base.Variant.BUILD
    if default and default.partition(":")[0] == base.OUR_BASE:
        return base.Variant.BUILD if default.endswith((":build", "-build")) else base.Variant.RUNTIME
    return None


def read_build_args(arguments: Sequence[str]) -> dict[str, str | None]:
    """Parse arguments `NAME=VALUE`, or `NAME` for the value of this process's environment variable."""
    parts = (argument.partition("=") for argument in arguments)
    return {name: value if equals else None for name, equals, value in parts}


def _dockerfile_of(folder: Path) -> str:
    if not folder.is_dir():
        raise ConfigurationError(f"there is no environment's folder at {folder}; check the path")
    if path_found := next((place for place in PLACES if (folder / place).is_file()), None):
        return path_found
    if not (folder / MANIFEST).is_file():
        raise ConfigurationError(
            f"expected an environment's folder, got {folder}, with neither {MANIFEST} nor a Dockerfile; "
            "name the folder that holds them, or make one with `ropewalk init NAME`"
        )
    raise ConfigurationError(
        f"expected a Dockerfile at {' or '.join(PLACES)} of {folder}, got none; `ropewalk init` writes one that "
        "you can copy"
    )


def build(build_plan: BuildPlan) -> str:
    """Build an environment's image and return its id; docker's output goes to standard error.

    Raises:
        BuildError: A step failed, or the engine refused the build.
        ConfigurationError: The command `docker` is not installed.
    """
    if build_plan.variant is not None:
        base.ensure(build_plan.variant)
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
