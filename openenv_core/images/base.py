"""The base image that environments stand on, and the installed Ropewalk in the form in which it is put there."""

import base64
import csv
import gzip
import hashlib
import io
import re
import shutil
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import as_file, files
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import openenv_core
from openenv_core.errors import ConfigurationError
from openenv_core.images import builders as sdk
from openenv_core.images.engine import inspect, replacing
from openenv_core.images.events import BuildRequest, Note, Tell

if TYPE_CHECKING:
    import docker

DISTRIBUTION: Final = "ropewalk"
EXTRA: Final = "server"
"""What an environment's container needs of it."""

_EXTRA_MARKER = re.compile(
    r"""^(?P<requirement>[^;]+?)\s*(?:;\s*extra\s*==\s*['"](?P<extra>[^'"]+)['"])?\s*$"""
)
_LEFT_BEHIND = ("__pycache__", "*.py[co]", "*.egg-info", ".*_cache")
_OF_THIS_PLACE = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json")
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the wheel: the same files give the same bytes, and the engine's cache holds."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Ropewalk in a folder that an image copies.

    Attributes:
        requirement: What pip is told to install; a path is relative to the folder.
        dependencies: What that needs, with the extra for servers.
    """

    requirement: str
    dependencies: tuple[str, ...]


def version() -> str:
    """Return the version of the installed Ropewalk.

    Raises:
        ConfigurationError: It is not installed.
    """
    tree = source_tree()
    return str(_project(tree)["version"]) if tree is not None else _distribution().version


def source_tree() -> Path | None:
    """Return the folder of the project where Ropewalk is run from its source, as an editable installation is."""
    root = Path(openenv_core.__file__).resolve().parents[1]
    try:
        return root if _project(root)["name"] == DISTRIBUTION else None
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None


def place(folder: Path) -> Placed:
    """Put the installed Ropewalk into an empty folder.

    A source tree becomes an archive of its source. What was installed from somewhere else than an index (a folder, a
    wheel, a repository) is packed into a wheel again, from what is installed. What an index gave, it will give again.

    Raises:
        ConfigurationError: Ropewalk is not installed.
    """
    tree = source_tree()
    if tree is not None:
        project = _project(tree)
        archive = _archive(tree, folder / f"{DISTRIBUTION}-{project['version']}.tar.gz")
        return Placed(
            f"./{archive.name}", (*project["dependencies"], *project["optional-dependencies"][EXTRA])
        )
    installed = _distribution()
    requirement = f"{DISTRIBUTION}=={installed.version}"
    if installed.read_text("direct_url.json") is not None:
        requirement = f"./{_pack(installed, folder).name}"
    return Placed(requirement, tuple(_dependencies(installed)))


def _project(root: Path) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def _distribution() -> Distribution:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise ConfigurationError(
            f"expected {DISTRIBUTION} to be installed, so that an image can have the same version, got no such "
            "distribution; pip install 'ropewalk[author]'"
        ) from None


def _dependencies(installed: Distribution) -> Iterator[str]:
    for line in installed.requires or ():
        match = _EXTRA_MARKER.match(line)
        if match is None:
            yield line  # with a marker of another kind, which pip understands
        elif match["extra"] in (None, EXTRA):
            yield match["requirement"]


def _archive(tree: Path, target: Path) -> Path:
    """Make an archive of the source: the same source gives the same bytes."""
    with gzip.GzipFile(target, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _shipped(tree):
            entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
            data = (tree / name).read_bytes()
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return target


def _shipped(tree: Path) -> Iterator[PurePosixPath]:
    """Yield what a wheel of the project is made of, relative to the tree."""
    with (tree / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    yield from map(PurePosixPath, ("pyproject.toml", project["readme"], *project["license-files"]))
    patterns = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in sorted(tree.iterdir()):
        if (package / "__init__.py").is_file() and any(fnmatchcase(package.name, one) for one in patterns):
            yield from _files(tree, package)


def _files(tree: Path, folder: Path) -> Iterator[PurePosixPath]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or any(fnmatchcase(path.name, one) for one in _LEFT_BEHIND):
            continue
        if path.is_dir():
            yield from _files(tree, path)
        elif path.is_file():
            yield PurePosixPath(path.relative_to(tree).as_posix())


def _pack(installed: Distribution, folder: Path) -> Path:
    """Make a wheel of what is installed."""
    wheel = folder / f"{DISTRIBUTION}-{installed.version}-py3-none-any.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    information = ""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(installed.files or (), key=str):
            # Scripts lie outside, and are made anew from the entry points.
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            if file.parts[0].endswith(".dist-info"):
                information = file.parts[0]
                if file.name in _OF_THIS_PLACE:
                    continue
            data = Path(str(file.locate())).read_bytes()
            archive.writestr(_entry(file.as_posix()), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((file.as_posix(), f"sha256={digest}", len(data)))
        rows.writerow((f"{information}/RECORD", "", ""))
        archive.writestr(_entry(f"{information}/RECORD"), record.getvalue())
    return wheel


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


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
    own = version().replace("+", "-")
    if variant is Variant.BUILD:
        return f"{REPOSITORY}:{own}-build", f"{REPOSITORY}:build"
    return f"{REPOSITORY}:{own}", f"{REPOSITORY}:latest"


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
        BuildError: It cannot be made.
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
            sdk.build_by_sdk(api, wanted, tell)
    return named[0]


def _made_from(api: "docker.APIClient", tag: str) -> str | None:
    from docker.errors import ImageNotFound

    try:
        found = inspect(api, tag)
    except ImageNotFound:
        return None
    return ((found.get("Config") or {}).get("Labels") or {}).get(FINGERPRINT)


@contextmanager
def context() -> Iterator[BuildRequest]:
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
        placed = place(folder / "ropewalk")
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in placed.dependencies))
        yield BuildRequest(
            context=folder,
            dockerfile="Dockerfile",
            tags=(REPOSITORY,),
            build_args={"ROPEWALK": placed.requirement},
            labels={FINGERPRINT: _fingerprint(folder), VERSION: version()},
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
