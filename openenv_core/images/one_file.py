"""The folder that an environment in one file stands for, when an image or a Space is made of it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import yaml

from openenv_core.checker.imports import find_imports
from openenv_core.errors import ConfigurationError
from openenv_core.images.base import OUR_BASE
from openenv_core.images.build import BASE_ARG
from openenv_core.manifest import MANIFEST
from openenv_core.one_file import read_file_manifest, read_header

_REQUIREMENTS: Final = "requirements.txt"

_DOCKERFILE: Final = Path(__file__).with_name("one_file.Dockerfile")


@contextmanager
def staged_folder(path: Path, name: str) -> Iterator[Path]:
    """Yield a folder with the file, a manifest, a Dockerfile and the dependencies of its header; then remove it.

    Args:
        path: The file.
        name: The environment's class.

    Raises:
        ConfigurationError: The file imports another one next to it, or its header is invalid.
    """
    if beside := sorted(
        each.module
        for each in find_imports(path.read_text(encoding="utf-8"))
        if each.module != path.stem
        and ((path.parent / f"{each.module}.py").is_file() or (path.parent / each.module).is_dir())
    ):
        raise ConfigurationError(
            f"{path.name} imports {', '.join(beside)} next to it, which an image of one file does not have; make a "
            "folder with `ropewalk init NAME --package`, and move both there"
        )
    manifest, dependencies = read_file_manifest(path, name), read_header(path).dependencies
    with TemporaryDirectory(prefix="ropewalk-file-") as temporary:
        folder = Path(temporary, path.stem)
        folder.mkdir()
        shutil.copy(path, folder / path.name)
        (folder / MANIFEST).write_text(yaml.safe_dump(manifest.model_dump(mode="json", exclude_unset=True)))
        if dependencies:
            (folder / _REQUIREMENTS).write_text("".join(f"{each}\n" for each in dependencies))
        install = f"RUN pip install -r /app/env/{_REQUIREMENTS}\n" if dependencies else ""
        (folder / "Dockerfile").write_text(
            _DOCKERFILE.read_text().format(arg=BASE_ARG, base=OUR_BASE, install=install, port=manifest.port)
        )
        yield folder
