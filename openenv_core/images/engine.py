"""The engine that images are built and kept with, and the removal of images that a new build supersedes."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import ConfigurationError

if TYPE_CHECKING:
    import docker

RESPONSE_TIMEOUT_S: Final = 120
"""Seconds that the engine may take to answer; a build's own output is waited for without a bound."""


@contextmanager
def engine() -> Iterator["docker.APIClient"]:
    """Open a connection to the engine, and close it in the end.

    Raises:
        ConfigurationError: The Docker SDK is not installed, or the engine is named in a way that cannot be followed.
        EngineUnavailableError: Nobody answers, or not to this user.
    """
    try:
        import docker
        from docker.errors import DockerException
        from docker.tls import TLSConfig
    except ImportError as error:
        raise ConfigurationError(
            f"expected the Docker SDK, got: {error}; pip install 'ropewalk[docker]'"
        ) from error
    from openenv_core.errors import EngineUnavailableError
    from openenv_core.providers.docker.engine import DockerEngine

    found = DockerEngine.find()
    found.ping()
    address = found.address
    tls: TLSConfig | bool = False
    if address.certificates is not None:
        folder = Path(address.certificates)
        tls = TLSConfig(
            client_cert=(str(folder / "cert.pem"), str(folder / "key.pem")),
            ca_cert=str(folder / "ca.pem"),
            verify=address.verify,
        )
    try:
        client = docker.APIClient(base_url=address.url, tls=tls, timeout=RESPONSE_TIMEOUT_S, version="auto")
    except DockerException as error:
        raise EngineUnavailableError(
            f"expected the Docker engine at {address.url} to speak with the Docker SDK, got: {error}; "
            "pip install -U docker"
        ) from error
    try:
        yield client
    finally:
        client.close()


@contextmanager
def hanging_up(api: "docker.APIClient") -> Iterator[None]:
    """Break off what the engine is answering when the block does not end well.

    The engine goes on with a build or a push until its caller hangs up, and the SDK keeps the answer to itself.
    """
    answers: list[Any] = []
    hooks = api.hooks["response"]

    def collect(answer: Any, *_: Any, **__: Any) -> None:
        answers.append(answer)

    hooks.append(collect)
    try:
        yield
    except BaseException:
        for answer in answers:
            answer.close()
        raise
    finally:
        hooks.remove(collect)


def inspect(api: "docker.APIClient", image: str) -> dict[str, Any]:
    """Return what the engine knows of an image; raises the SDK's ImageNotFound."""
    found: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]
    return found


PARTS: Final = "ropewalk.parts"
"""The label of the base's first stage, which stays behind nameless as the engine's cache."""

RECENT_STAGE_AGE_S: Final = 600
"""Seconds in which a first stage may still be waited for by another build on this engine."""

_OURS: Final = "ropewalk."


@contextlib.contextmanager
def replacing(api: "docker.APIClient", tags: Sequence[str]) -> Iterator[None]:
    """Remove what had these names before the block, where it ended well and nothing needs that any more.

    Only images that `ropewalk build` made are removed. One that has another name, that a container was made of, or
    that another image stands on stays; it goes when the last of those is built anew.
    """
    before = {found for tag in tags if (found := _ours(api, tag)) is not None}
    yield
    for image in before:
        _remove(api, image)
    _remove_old_parts(api)


def _ours(api: "docker.APIClient", tag: str) -> str | None:
    from docker.errors import ImageNotFound

    try:
        found = inspect(api, tag)
    except ImageNotFound:
        return None
    labels = (found.get("Config") or {}).get("Labels") or {}
    return str(found["Id"]) if any(name.startswith(_OURS) for name in labels) else None


def _remove(api: "docker.APIClient", image: str) -> None:
    """Remove an image without names, and what was only its own of the steps below."""
    from docker.errors import APIError

    # What cannot be removed is left: the build itself has gone well.
    with contextlib.suppress(APIError, OSError):
        found = inspect(api, image)
        if not found.get("RepoTags") and not found.get("RepoDigests"):
            api.remove_image(image)


def _remove_old_parts(api: "docker.APIClient") -> None:
    """Keep the newest of the first stages, which the next base is made from, and those that may be in use."""
    from docker.errors import APIError

    parts: list[dict[str, Any]] = []
    with contextlib.suppress(APIError, OSError):
        parts = api.images(filters={"dangling": True, "label": PARTS})
    parts.sort(key=lambda one: one["Created"], reverse=True)
    for one in parts[1:]:
        if one["Created"] < time.time() - RECENT_STAGE_AGE_S:
            _remove(api, one["Id"])
