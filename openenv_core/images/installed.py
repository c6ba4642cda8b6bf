"""The installed Ropewalk, in the form in which an image can install it too."""

import base64
import csv
import gzip
import hashlib
import io
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any, Final

import openenv_core
from openenv_core.errors import ConfigurationError

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
