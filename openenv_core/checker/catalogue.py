"""Every check there is, in the order in which they run."""

import difflib
import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from openenv_core import checker
from openenv_core.apps import load_app
from openenv_core.checker.check import Check, CheckError, CheckLevel
from openenv_core.checker.subject import Subject
from openenv_core.errors import ConfigurationError, ImageNotFoundError
from openenv_core.manifest import MANIFEST
from openenv_core.targets import TargetKind, can_be_found, is_environment_folder

MODULES: Final = ("static", "static_image", "runtime", "runtime_episodes", "semantic", "hostile", "load")
"""Those that hold checks, by level."""


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks: module by module, each as its file has them."""
    return tuple(
        one for name in MODULES for one in _checks_of(importlib.import_module(f"{checker.__name__}.{name}"))
    )


def chosen(levels: Iterable[CheckLevel] = (), names: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks of some levels and of some names; all of them where neither is given.

    Raises:
        ConfigurationError: There is no check of that name.
    """
    known = {one.name: one for one in checks()}
    wanted = [name.replace("-", "_").removeprefix("check_") for name in names]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "ropewalk validate --list tells them"
            raise ConfigurationError(f"expected the name of a check, got {name!r}; {hint}")
    at = set(levels)
    if not at and not wanted:
        return checks()
    return tuple(one for one in checks() if one.level in at or one.name in wanted)


def _checks_of(module: ModuleType) -> Iterator[Check]:
    for value in vars(module).values():
        if isinstance(value, Check) and value.function.__module__ == module.__name__:
            yield value


def require(subject: Subject) -> None:
    """Return when the target is there; whether it is any good is for the checks to say.

    Raises:
        ConfigurationError: There is no such environment, or nothing answers at the URL.
        ProviderError: There is no such image, or no engine to run it.
    """
    if subject.kind is TargetKind.URL:
        _require_server(subject)
    elif subject.kind is TargetKind.IMAGE:
        _require_image(subject.target.text)
    elif subject.kind is TargetKind.PATH and _is_no_environment(Path(subject.target.text)):
        raise ConfigurationError(
            f"expected an environment in the folder {subject.target.text}, got neither {MANIFEST} nor server/app.py "
            "there; name the folder that holds them"
        )
    elif not can_be_found(subject.target):
        load_app(subject.target.text)  # says which there are


def _is_no_environment(path: Path) -> bool:
    return path.is_dir() and not is_environment_folder(path)


def _require_server(subject: Subject) -> None:
    try:
        with subject.http() as http:
            http.get("/health")
    except CheckError as error:
        raise ConfigurationError(f"{error.message}; start it first") from None


def _require_image(image: str) -> None:
    from openenv_core.providers.docker.engine import DockerEngine

    engine = DockerEngine.find()
    engine.ping()
    if not engine.has_image(image):
        raise ImageNotFoundError(
            f"expected an environment's name, a path that exists, or an image of the local engine, got {image!r}; "
            "`ropewalk list` tells the names, and `ropewalk build PATH` makes an image"
        )
