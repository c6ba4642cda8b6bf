"""Finds the Docker engine and calls its API."""

import hashlib
import http.client
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError, EngineRefusedError, EngineUnavailableError
from openenv_core.providers.docker import _wire
from openenv_core.providers.docker._wire import EngineAddress

DEFAULT_SOCKET: Final = "/var/run/docker.sock"


def find_engine() -> EngineAddress:
    """Return the engine's address, from DOCKER_HOST, the current context or the usual socket.

    Raises:
        ConfigurationError: The address is invalid or not supported.
        EngineUnavailableError: The current context does not exist.
    """
    if host := os.environ.get("DOCKER_HOST"):
        verify = os.environ.get("DOCKER_TLS_VERIFY", "") != ""
        folder = os.environ.get("DOCKER_CERT_PATH") or (str(_config_folder()) if verify else None)
        return _check_address(
            EngineAddress(host, folder if host.startswith("tcp") else None, verify), "DOCKER_HOST"
        )
    name = os.environ.get("DOCKER_CONTEXT") or _read_docker_config().get("currentContext") or "default"
    if name != "default":
        return _of_context(str(name))
    return EngineAddress(f"unix://{_usual_socket()}")


def is_local(address: EngineAddress) -> bool:
    """Whether the engine's loopback interface, on which it publishes ports, is this machine's."""
    parts = urlsplit(address.url)
    return parts.scheme == "unix" or parts.hostname in ("127.0.0.1", "localhost", "::1")


def _check_address(address: EngineAddress, source: str) -> EngineAddress:
    try:
        parts = urlsplit(address.url)
        # In unix://relative/path, "relative" would be parsed as the host.
        if (parts.scheme == "unix" and parts.path.strip("/") and not parts.netloc) or (
            parts.scheme == "tcp" and parts.port != 0
        ):
            return address
    except ValueError:
        pass  # for example an invalid port
    raise ConfigurationError(
        f"expected {source} to be unix:///path or tcp://host:port, got {address.url!r}; "
        "forward an engine that is reached over ssh: ssh -L /tmp/engine.sock:/var/run/docker.sock HOST, "
        "then DOCKER_HOST=unix:///tmp/engine.sock"
    )


def _config_folder() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path(os.path.expanduser("~")) / ".docker")


def _read_docker_config() -> dict[str, Any]:
    try:
        document = json.loads((_config_folder() / "config.json").read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    return document if isinstance(document, dict) else {}


def _of_context(name: str) -> EngineAddress:
    identity = hashlib.sha256(name.encode()).hexdigest()
    folder = _config_folder() / "contexts"
    try:
        endpoint = json.loads((folder / "meta" / identity / "meta.json").read_text())["Endpoints"]["docker"]
        host = str(endpoint["Host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineUnavailableError(
            f"expected a Docker context {name!r}, got none that can be read ({error}); "
            "`docker context ls` lists them, `docker context use default` goes back"
        ) from error
    certificates = folder / "tls" / identity / "docker"
    return _check_address(
        EngineAddress(
            host,
            str(certificates) if certificates.is_dir() else None,
            not endpoint.get("SkipTLSVerify", False),
        ),
        f"the Docker context {name!r}",
    )


def _usual_socket() -> str:
    places = [DEFAULT_SOCKET]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(f"{runtime}/docker.sock")
    if sys.platform == "darwin":
        places.append(str(Path(os.path.expanduser("~")) / ".docker" / "run" / "docker.sock"))
    return next((place for place in places if os.path.exists(place)), DEFAULT_SOCKET)


HOW_TO: Final = (
    "start one (`sudo systemctl start docker`, Docker Desktop, or `scripts/docker-engine start` in a checkout), "
    "or let DOCKER_HOST name another"
)
CALL_TIMEOUT_S: Final = 60.0
"""Timeout of a request, in seconds."""

DONE: Final = (200, 201, 204, 304)


@dataclass(frozen=True, slots=True)
class DockerEngine:
    """A Docker engine. Each call opens its own connection, so threads and forks can share it."""

    address: EngineAddress

    @classmethod
    def find(cls) -> "DockerEngine":
        """Return the engine named by DOCKER_HOST, the current context or the usual socket.

        Raises:
            ConfigurationError: The address is invalid or not supported.
            EngineUnavailableError: The current context does not exist.
        """
        return cls(find_engine())

    def call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: Any = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Send a request and return the JSON of the response; None if it has no body.

        Raises:
            EngineUnavailableError: The engine does not respond.
            EngineRefusedError: The engine rejected the request.
        """
        answer = self._request(method, path, query, body, timeout_s)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineUnavailableError(
                f"expected JSON from the Docker engine for {method} {path}, got {answer.text()!r}"
            ) from error

    def ping(self, timeout_s: float = 5.0) -> None:
        """Check that the engine responds. Raises `EngineUnavailableError` if not."""
        self._request("GET", "/_ping", None, None, timeout_s)

    def find_image(self, name: str) -> dict[str, Any] | None:
        """Return the engine's description of an image; None if it has no image of that name.

        Raises:
            EngineUnavailableError: The engine does not respond.
        """
        try:
            image: dict[str, Any] = self.call("GET", f"/images/{name}/json")
        except EngineRefusedError as error:
            if error.status in (400, 404):
                return None
            raise
        return image

    def has_image(self, name: str) -> bool:
        """Whether the engine has an image of this name."""
        return self.find_image(name) is not None

    def inspect(self, container: str) -> dict[str, Any]:
        """Return the engine's description of a container."""
        details: dict[str, Any] = self.call("GET", f"/containers/{container}/json")
        return details

    def list_labelled(self, *labels: str) -> list[dict[str, Any]]:
        """Return the containers with all these labels ("key" or "key=value"), including stopped ones."""
        query = {"all": True, "filters": {"label": list(labels)}}
        containers: list[dict[str, Any]] = self.call("GET", "/containers/json", query=query)
        return containers

    def logs(self, container: str, tail: int) -> bytes:
        """Return the last lines of a container's output, both streams interleaved."""
        query = {"stdout": True, "stderr": True, "tail": tail}
        return _without_headers(
            self._request("GET", f"/containers/{container}/logs", query, None, CALL_TIMEOUT_S).body
        )

    def archive(self, container: str, path: str) -> bytes:
        """Return a file or folder of a container as a tar archive. Raises `EngineRefusedError` (404) if missing."""
        return self._request(
            "GET", f"/containers/{container}/archive", {"path": path}, None, CALL_TIMEOUT_S
        ).body

    def put_archive(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar archive in a container's folder. Raises `EngineRefusedError` (404) if it is missing."""
        query = {"path": path, "noOverwriteDirNonDir": "true"}
        self._request("PUT", f"/containers/{container}/archive", query, archive, CALL_TIMEOUT_S)

    def execute(
        self, container: str, command: Sequence[str], *, timeout_s: float, most: int, **settings: Any
    ) -> "EngineExecution":
        """Run a command in a container.

        After a timeout or too much output the command keeps running; the caller must deal with it.

        Args:
            container: Id of the container.
            command: The program and its arguments.
            timeout_s: Timeout in seconds.
            most: Maximum bytes of output to read, of both streams together.
            settings: The engine's settings of an exec: `User`, `WorkingDir`, `Env` etc.

        Raises:
            EngineUnavailableError: The engine does not respond.
            EngineRefusedError: The engine rejected the request, for example because the container is not running.
        """
        request = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command), **settings}
        exec_id = self.call("POST", f"/containers/{container}/exec", body=request)["Id"]
        with self._translate_errors(f"POST /exec/{exec_id}/start", timeout_s):
            response, ended = _wire.stream(
                self.address,
                f"/exec/{exec_id}/start",
                {"Detach": False, "Tty": False},
                timeout_s=timeout_s,
                most=most,
            )
        if response.status not in DONE:
            raise _refusal(f"POST /exec/{exec_id}/start", response)
        output = _without_headers(response.body)
        if not ended:
            return EngineExecution(output, None, len(response.body) >= most)
        return EngineExecution(output, int(self.call("GET", f"/exec/{exec_id}/json")["ExitCode"]), False)

    def ended_for_memory(self, container: str, since: float, until: float) -> bool:
        """Whether the OOM killer killed a process of the container between two Unix times."""
        query = {
            "since": f"{since:.3f}",
            "until": f"{until:.3f}",
            "filters": {"container": [container], "event": ["oom"], "type": ["container"]},
        }
        try:
            return bool(self._request("GET", "/events", query, None, 5.0).body.strip())
        except EngineUnavailableError:
            return False

    def _request(
        self, method: str, path: str, query: dict[str, Any] | None, body: Any, timeout_s: float
    ) -> _wire.EngineResponse:
        with self._translate_errors(f"{method} {path}", timeout_s):
            answer = _wire.call(self.address, method, path, query=query, body=body, timeout_s=timeout_s)
        if answer.status not in DONE:
            raise _refusal(f"{method} {path}", answer)
        return answer

    @contextmanager
    def _translate_errors(self, request: str, timeout_s: float) -> Iterator[None]:
        """Convert exceptions of a request to `EngineUnavailableError` with a clear message."""
        try:
            yield
        except PermissionError as error:
            raise EngineUnavailableError(
                f"expected to be let in by the Docker engine at {self.address.url}, got: {error}; "
                "add yourself to its group (`sudo usermod -aG docker $USER`, then log in again)"
            ) from error
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"expected the Docker engine at {self.address.url} to answer {request} "
                f"within {timeout_s:g} s, got nothing; see its log"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailableError(
                f"expected a Docker engine at {self.address.url}, got {type(error).__name__}: {error}; {HOW_TO}"
            ) from error


@dataclass(frozen=True, slots=True)
class EngineExecution:
    """The result of a command in a container.

    Attributes:
        output: Output of both streams, interleaved.
        exit_code: The exit code; None if the command is still running.
        full: Whether the limit of output was reached; if False and there is no exit code, it timed out.
    """

    output: bytes
    exit_code: int | None
    full: bool


def _refusal(request: str, answer: _wire.EngineResponse) -> EngineRefusedError:
    text = answer.text()
    return EngineRefusedError(
        f"expected the Docker engine to do {request}, got {answer.status}: {text}", answer.status, text
    )


def _without_headers(data: bytes) -> bytes:
    """Remove the engine's header before each piece of a log; a terminal's log has no headers."""
    if data[:1] > b"\2" or data[1:4] != b"\0\0\0":
        return data
    return b"".join(piece for _, piece in _wire.StreamSplitter().feed(data))
