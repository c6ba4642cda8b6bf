"""Which engine: what the environment, a context or the usual places say."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError, EngineUnavailable
from openenv_core.providers.docker._wire import Address

USUAL: Final = "/var/run/docker.sock"


def find_engine() -> Address:
    """Return where the engine is: DOCKER_HOST, else the context in use, else the usual socket.

    Raises:
        ConfigurationError: It is named in a way that cannot be followed.
        EngineUnavailable: The context in use is not there.
    """
    if host := os.environ.get("DOCKER_HOST"):
        verify = os.environ.get("DOCKER_TLS_VERIFY", "") != ""
        folder = os.environ.get("DOCKER_CERT_PATH") or (str(_config_folder()) if verify else None)
        return _checked(Address(host, folder if host.startswith("tcp") else None, verify), "DOCKER_HOST")
    name = os.environ.get("DOCKER_CONTEXT") or _configured().get("currentContext") or "default"
    if name != "default":
        return _of_context(str(name))
    return Address(f"unix://{_usual_socket()}")


def is_local(address: Address) -> bool:
    """Whether ports that the engine publishes on its loopback interface can be reached from here."""
    parts = urlsplit(address.url)
    return parts.scheme == "unix" or parts.hostname in ("127.0.0.1", "localhost", "::1")


def _checked(address: Address, source: str) -> Address:
    try:
        parts = urlsplit(address.url)
        # A path that is not absolute would be read as a host's name, and another be taken.
        if (parts.scheme == "unix" and parts.path.strip("/") and not parts.netloc) or (
            parts.scheme == "tcp" and parts.port != 0
        ):
            return address
    except ValueError:
        pass  # a port that is none, say
    raise ConfigurationError(
        f"expected {source} to be unix:///path or tcp://host:port, got {address.url!r}; "
        "forward an engine that is reached over ssh: ssh -L /tmp/engine.sock:/var/run/docker.sock HOST, "
        "then DOCKER_HOST=unix:///tmp/engine.sock"
    )


def _config_folder() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _configured() -> dict[str, Any]:
    try:
        found = json.loads((_config_folder() / "config.json").read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_context(name: str) -> Address:
    identity = hashlib.sha256(name.encode()).hexdigest()
    folder = _config_folder() / "contexts"
    try:
        endpoint = json.loads((folder / "meta" / identity / "meta.json").read_text())["Endpoints"]["docker"]
        host = str(endpoint["Host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineUnavailable(
            f"expected a Docker context {name!r}, got none that can be read ({error}); "
            "`docker context ls` lists them, `docker context use default` goes back"
        ) from error
    certificates = folder / "tls" / identity / "docker"
    return _checked(
        Address(
            host,
            str(certificates) if certificates.is_dir() else None,
            not endpoint.get("SkipTLSVerify", False),
        ),
        f"the Docker context {name!r}",
    )


def _usual_socket() -> str:
    places = [USUAL]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(f"{runtime}/docker.sock")
    if sys.platform == "darwin":
        places.append(str(Path.home() / ".docker" / "run" / "docker.sock"))
    return next((place for place in places if os.path.exists(place)), USUAL)
