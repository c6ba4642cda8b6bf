"""The engine that images are built and kept with: the one that containers are started on, through the Docker SDK."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
