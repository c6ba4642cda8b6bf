"""The base image of environments, and how the installed Ropewalk is packaged for it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import Distribution, distributions
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.images.engine import BuildRequest, build_image

OUR_BASE: Final = "ropewalk-base"
"""The name of our base image; the runtime variant has a user, a health check and a port."""

DISTRIBUTION: Final = "ropewalk"
EXTRA: Final = "server"
"""The extra of Ropewalk that an environment's container needs."""

WHEEL_TIMEOUT_S: Final = 300
"""Seconds for pip to build the wheel."""

_EPOCH_S: Final = "315532800"
"""Modification time of every file in the wheel, so that equal files give equal bytes and the engine's cache hits."""


def copy_package(folder: Path) -> str:
    """Put the installed Ropewalk into an empty folder; return the requirement for pip to install there.

    An installation from an index becomes a requirement with its version; any other source, such as the folder of an
    editable installation, becomes a wheel.

    Raises:
        ConfigurationError: Ropewalk is not installed, or no wheel can be built from its source.
    """
    dist = _distribution()
    text = dist.read_text("direct_url.json")
    if text is None:
        return f"{DISTRIBUTION}[{EXTRA}]=={dist.version}"
    origin = json.loads(text)
    source = str(origin["url"])
    if repository := origin.get("vcs_info"):
        source = f"{repository['vcs']}+{source}@{repository['commit_id']}"
    return f"./{_make_wheel(source, folder).name}[{EXTRA}]"


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


def _distribution() -> Distribution:
    """Return the installed Ropewalk; a build's egg-info in a checkout, which is found first there, has no origin."""
    found = list(distributions(name=DISTRIBUTION))
    if not found:
        raise ConfigurationError(
            f"{DISTRIBUTION} is not installed, so no image can have the same version; pip install 'ropewalk[author]'"
        )
    return next((each for each in found if each.read_text("direct_url.json") is not None), found[0])


FINGERPRINT: Final = "ropewalk.base"
"""The label with the digest of the files that a base was built from."""

_SHIPPED: Final = "dockerfiles.base"


class Variant(StrEnum):
    """The variants of the base; each value is the Dockerfile's stage that builds it."""

    RUNTIME = "ropewalk-runtime"
    """The base of environments: the user `env`, without build tools."""

    BUILD = "ropewalk-build"
    """The base for Dockerfiles of the released scaffold: root, with uv, git and curl."""


def tags(variant: Variant) -> tuple[str, ...]:
    """Return the tags of the installed Ropewalk's base, the one with its version first."""
    tag = _distribution().version.replace("+", "-")
    if variant is Variant.BUILD:
        return f"{OUR_BASE}:{tag}-build", f"{OUR_BASE}:build"
    return f"{OUR_BASE}:{tag}", f"{OUR_BASE}:latest"


def ensure(variant: Variant, *, build_args: Mapping[str, str | None] | None = None) -> str:
    """Build the base if it is missing or was built from another Ropewalk; return its tag.

    Raises:
        BuildError: It cannot be built.
    """
    from openenv_core.providers.docker.engine import DockerEngine

    image_tags = tags(variant)
    with context() as request:
        image = DockerEngine.find().find_image(image_tags[0]) or {}
        fingerprint = ((image.get("Config") or {}).get("Labels") or {}).get(FINGERPRINT)
        if not build_args and fingerprint == request.labels[FINGERPRINT]:
            return image_tags[0]
        sys.stderr.write(f"making the base image {image_tags[0]}: it is missing, or of another Ropewalk\n")
        build_args = {**request.build_args, **(build_args or {})}
        build_image(replace(request, tags=image_tags, target=variant.value, build_args=build_args))
    return image_tags[0]


@contextmanager
def context() -> Iterator[BuildRequest]:
    """Yield a request to build the base, whose context is a folder that is removed after the block."""
    temporary_folder = tempfile.TemporaryDirectory(prefix="ropewalk-base-")
    with temporary_folder as temporary, as_file(files(_SHIPPED)) as source:
        folder = Path(temporary)
        for name in ("Dockerfile", "healthcheck.py"):
            shutil.copyfile(source / name, folder / name)
        (folder / "ropewalk").mkdir()
        requirement = copy_package(folder / "ropewalk")
        yield BuildRequest(
            context=folder,
            dockerfile="Dockerfile",
            tags=(OUR_BASE,),
            build_args={"ROPEWALK": requirement},
            labels={FINGERPRINT: _fingerprint(folder)},
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
