"""The engine that images are built and kept with: the one that containers are started on, through the Docker SDK."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import ConfigurationError

if TYPE_CHECKING:
    import docker

ANSWER_S: Final = 120
"""Seconds that the engine may take to answer; a build's own output is waited for without a bound."""


@contextmanager
def engine() -> Iterator["docker.APIClient"]:
    """Open a connection to the engine, and close it in the end.

    Raises:
        ConfigurationError: The Docker SDK is not installed, or the engine is named in a way that cannot be followed.
        EngineUnavailable: Nobody answers, or not to this user.
    """
    try:
        import docker
        from docker.errors import DockerException
        from docker.tls import TLSConfig
    except ImportError as error:
        raise ConfigurationError(
            f"expected the Docker SDK, got: {error}; pip install 'ropewalk[docker]'"
        ) from error
    from openenv_core.errors import EngineUnavailable
    from openenv_core.providers.docker.engine import Engine

    found = Engine.find()
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
        client = docker.APIClient(base_url=address.url, tls=tls, timeout=ANSWER_S, version="auto")
    except DockerException as error:
        raise EngineUnavailable(
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
