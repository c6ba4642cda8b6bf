"""The base image of environments, and how the installed Ropewalk is packaged for it."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import openenv_core
from openenv_core.errors import ConfigurationError
from openenv_core.images.dockerfile import OUR_BASE
from openenv_core.images.engine import BuildRequest, build_image, find_image, labels_of, replace_tags

if TYPE_CHECKING:
    import docker

DISTRIBUTION: Final = "ropewalk"
EXTRA: Final = "server"
"""The extra of Ropewalk that an environment's container needs."""

_EXTRA_MARKER = re.compile(
    r"""^(?P<requirement>[^;]+?)\s*(?:;\s*extra\s*==\s*['"](?P<extra>[^'"]+)['"])?\s*$"""
)
WHEEL_TIMEOUT_S: Final = 300
"""Seconds for pip to build the wheel."""

_EPOCH_S: Final = "315532800"
"""Modification time of every file in the wheel, so that equal files give equal bytes and the engine's cache hits."""


@dataclass(frozen=True, slots=True)
class PlacedPackage:
    """Ropewalk in a folder that an image copies.

    Attributes:
        requirement: The requirement for pip to install; a path is relative to the folder.
        dependencies: Its dependencies, including those of EXTRA.
    """

    requirement: str
    dependencies: tuple[str, ...]


def version() -> str:
    """Return the version of the installed Ropewalk; ConfigurationError if it is not installed."""
    tree = source_tree()
    return str(_project(tree)["version"]) if tree is not None else _distribution().version


def source_tree() -> Path | None:
    """Return the project's folder if Ropewalk runs from its source, as in an editable installation; otherwise None."""
    root = Path(openenv_core.__file__).resolve().parents[1]
    try:
        return root if _project(root)["name"] == DISTRIBUTION else None
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None


def copy_package(folder: Path) -> PlacedPackage:
    """Put the installed Ropewalk into an empty folder.

    An installation from an index becomes a requirement with its version; any other source becomes a wheel.

    Raises:
        ConfigurationError: Ropewalk is not installed, or no wheel can be built from its source.
    """
    tree = source_tree()
    if tree is not None:
        source = str(tree)
    else:
        dist = _distribution()
        origin = dist.read_text("direct_url.json")
        if origin is None:
            return PlacedPackage(f"{DISTRIBUTION}=={dist.version}", tuple(_dependencies(dist)))
        source = str(json.loads(origin)["url"])
    wheel = _make_wheel(source, folder)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (
            entry for entry in zipfile.Path(archive).iterdir() if entry.name.endswith(".dist-info")
        )
        return PlacedPackage(f"./{wheel.name}", tuple(_dependencies(PathDistribution(metadata))))


def _make_wheel(source: str, folder: Path) -> Path:
    """Build a wheel from a project's folder, archive, wheel or URL; the same source gives the same bytes."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-wheel-") as scratch:
        # Keep build files out of the source.
        settings = Path(scratch) / "setup.cfg"
        settings.write_text(f"[build]\nbuild_base = {scratch}\n[egg_info]\negg_base = {scratch}\n")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        process = subprocess.run(
            [*command, "--no-deps", "--wheel-dir", str(folder), source],
            env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH_S, "DIST_EXTRA_CONFIG": str(settings)},
            capture_output=True,
            text=True,
            timeout=WHEEL_TIMEOUT_S,
            check=False,
        )
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        output = (process.stderr or process.stdout).strip()[-2000:]
        raise ConfigurationError(
            f"pip could not make a wheel of Ropewalk from {source}, which the image installs:\n{output}\n"
            "reinstall Ropewalk from a source that exists; `python -m ensurepip` installs pip itself"
        )
    return wheels[0]


def _project(root: Path) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def _distribution() -> Distribution:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise ConfigurationError(
            f"{DISTRIBUTION} is not installed, so no image can have the same version; pip install 'ropewalk[author]'"
        ) from None


def _dependencies(dist: Distribution) -> Iterator[str]:
    for line in dist.requires or ():
        match = _EXTRA_MARKER.match(line)
        if match is None:
            yield line  # it has another kind of marker, which pip evaluates
        elif match["extra"] in (None, EXTRA):
            yield match["requirement"]


FINGERPRINT: Final = "ropewalk.base"
"""The label with the digest of the files that a base was built from."""

VERSION: Final = "ropewalk.version"

_SHIPPED: Final = "dockerfiles.base"


class Variant(StrEnum):
    """The variants of the base; each value is the Dockerfile's stage that builds it."""

    RUNTIME = "ropewalk-runtime"
    """The base of environments: the user `env`, without build tools."""

    BUILD = "ropewalk-build"
    """The base for Dockerfiles of the released scaffold: root, with uv, git and curl."""


def tags(variant: Variant) -> tuple[str, ...]:
    """Return the tags of the installed Ropewalk's base, the one with its version first."""
    tag = version().replace("+", "-")
    if variant is Variant.BUILD:
        return f"{OUR_BASE}:{tag}-build", f"{OUR_BASE}:build"
    return f"{OUR_BASE}:{tag}", f"{OUR_BASE}:latest"


def ensure(
    api: "docker.APIClient",
    variant: Variant,
    *,
    build_args: Mapping[str, str] | None = None,
    no_cache: bool = False,
    pull: bool = False,
    always: bool = False,
) -> str:
    """Build the base if it is missing or was built from another Ropewalk; return its tag.

    Raises:
        BuildError: It cannot be built.
    """
    image_tags = tags(variant)
    with context() as request:
        fingerprint = request.labels[FINGERPRINT]
        if (
            not (always or no_cache or pull or build_args)
            and _read_fingerprint(api, image_tags[0]) == fingerprint
        ):
            return image_tags[0]
        sys.stderr.write(f"making the base image {image_tags[0]}: it is missing, or of another Ropewalk\n")
        base_request = replace(
            request,
            tags=image_tags,
            target=variant.value,
            build_args={**request.build_args, **(build_args or {})},
            no_cache=no_cache,
            pull=pull,
        )
        with replace_tags(api, image_tags):
            build_image(base_request)
    return image_tags[0]


def _read_fingerprint(api: "docker.APIClient", tag: str) -> str | None:
    image = find_image(api, tag)
    return None if image is None else labels_of(image).get(FINGERPRINT)


@contextmanager
def context() -> Iterator[BuildRequest]:
    """Yield a request to build the base, whose context is a folder that is removed after the block."""
    try:
        resources = files(_SHIPPED)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"expected the package {_SHIPPED} of Ropewalk, which holds the base's Dockerfile, got: {error}; "
            "install ropewalk again"
        ) from error
    with tempfile.TemporaryDirectory(prefix="ropewalk-base-") as temporary, as_file(resources) as source:
        folder = Path(temporary)
        for name in ("Dockerfile", "healthcheck.py"):
            shutil.copyfile(source / name, folder / name)
        (folder / "ropewalk").mkdir()
        package = copy_package(folder / "ropewalk")
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in package.dependencies))
        yield BuildRequest(
            context=folder,
            dockerfile="Dockerfile",
            tags=(OUR_BASE,),
            build_args={"ROPEWALK": package.requirement},
            labels={FINGERPRINT: _fingerprint(folder), VERSION: version()},
        )


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            hasher.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
            hasher.update(data)
    return hasher.hexdigest()
