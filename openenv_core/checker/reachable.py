"""Whether there is anything to look at, before the first check looks."""

from pathlib import Path

from openenv_core.apps import load_app
from openenv_core.checker.check import CheckFailed
from openenv_core.checker.subject import Subject
from openenv_core.errors import ConfigurationError, ImageNotFound
from openenv_core.manifest import MANIFEST
from openenv_core.targets import TargetKind, can_be_found, is_environment_folder


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
    except CheckFailed as error:
        raise ConfigurationError(f"{error.message}; start it first") from None


def _require_image(image: str) -> None:
    from openenv_core.providers.docker.engine import Engine

    engine = Engine.find()
    engine.ping()
    if not engine.has_image(image):
        raise ImageNotFound(
            f"expected an environment's name, a path that exists, or an image of the local engine, got {image!r}; "
            "`ropewalk list` tells the names, and `ropewalk build PATH` makes an image"
        )
