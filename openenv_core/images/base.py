"""The base image that environments stand on: whether it is there, and making it."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.errors import ConfigurationError
from openenv_core.images import installed, sdk
from openenv_core.images.engine import inspect
from openenv_core.images.events import Note, Tell
from openenv_core.images.request import Request
from openenv_core.images.superseded import replacing

if TYPE_CHECKING:
    import docker

REPOSITORY: Final = "ropewalk-base"
FINGERPRINT: Final = "ropewalk.base"
"""The label that says from what a base was made."""

VERSION: Final = "ropewalk.version"

_SHIPPED: Final = "dockerfiles.base"


class Variant(StrEnum):
    """Which of the two: the name of the Dockerfile's stage that makes it."""

    RUNTIME = "ropewalk-runtime"
    """What environments stand on: the user `env`, and nothing to build with."""

    BUILD = "ropewalk-build"
    """For Dockerfiles of the released scaffold: root, with uv, git and curl."""


def tags(variant: Variant) -> tuple[str, ...]:
    """Return what the installed Ropewalk's base is called: by its version first."""
    version = installed.version().replace("+", "-")
    if variant is Variant.BUILD:
        return f"{REPOSITORY}:{version}-build", f"{REPOSITORY}:build"
    return f"{REPOSITORY}:{version}", f"{REPOSITORY}:latest"


def ensure(
    api: "docker.APIClient",
    variant: Variant,
    tell: Tell,
    *,
    build_args: Mapping[str, str] | None = None,
    no_cache: bool = False,
    pull: bool = False,
    always: bool = False,
) -> str:
    """Return the base's tag, after making it where it is missing or made from another Ropewalk.

    Raises:
        BuildFailed: It cannot be made.
    """
    named = tags(variant)
    with context() as request:
        fingerprint = request.labels[FINGERPRINT]
        if not (always or no_cache or pull or build_args) and _made_from(api, named[0]) == fingerprint:
            return named[0]
        tell(Note(f"the base image {named[0]} comes first: it is missing, or made from another Ropewalk"))
        wanted = replace(
            request,
            tags=named,
            target=variant.value,
            build_args={**request.build_args, **(build_args or {})},
            no_cache=no_cache,
            pull=pull,
        )
        with replacing(api, named):
            sdk.build(api, wanted, tell)
    return named[0]


def _made_from(api: "docker.APIClient", tag: str) -> str | None:
    from docker.errors import ImageNotFound

    try:
        found = inspect(api, tag)
    except ImageNotFound:
        return None
    return ((found.get("Config") or {}).get("Labels") or {}).get(FINGERPRINT)


@contextmanager
def context() -> Iterator[Request]:
    """Put together, in a folder that lasts as long as the block, what the base is built from."""
    try:
        shipped = files(_SHIPPED)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"expected the package {_SHIPPED} of Ropewalk, which holds the base's Dockerfile, got: {error}; "
            "install ropewalk again"
        ) from error
    with tempfile.TemporaryDirectory(prefix="ropewalk-base-") as made, as_file(shipped) as source:
        folder = Path(made)
        for name in ("Dockerfile", "healthcheck.py"):
            shutil.copyfile(source / name, folder / name)
        (folder / "ropewalk").mkdir()
        placed = installed.place(folder / "ropewalk")
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in placed.dependencies))
        yield Request(
            context=folder,
            dockerfile="Dockerfile",
            tags=(REPOSITORY,),
            build_args={"ROPEWALK": placed.requirement},
            labels={FINGERPRINT: _fingerprint(folder), VERSION: installed.version()},
        )


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names and contents in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            found.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
            found.update(data)
    return found.hexdigest()
