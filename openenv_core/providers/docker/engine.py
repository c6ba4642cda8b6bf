"""Finds the Docker engine and calls its API with the Docker SDK."""

import asyncio
import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from openenv_core.errors import (
    ConfigurationError,
    EngineRefusedError,
    EngineUnavailableError,
    installed_with,
)
from openenv_core.loop_thread import run_async_safely
from openenv_core.providers.docker.attach import EngineAddress, attach

if TYPE_CHECKING:
    import docker

DEFAULT_SOCKET: Final = "/var/run/docker.sock"


def find_engine() -> EngineAddress:
    """Return the engine's address, from DOCKER_HOST, the current context or the default socket.

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
    name = os.environ.get("DOCKER_CONTEXT")
    with suppress(OSError, ValueError, AttributeError):  # there is no such file, or it is of no use
        name = name or json.loads((_config_folder() / "config.json").read_text()).get("currentContext")
    if name and name != "default":
        return _of_context(str(name))
    return EngineAddress(f"unix://{DEFAULT_SOCKET}")


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


HOW_TO: Final = (
    "start one (`sudo systemctl start docker`, Docker Desktop, or `scripts/docker-engine start` in a checkout), "
    "or let DOCKER_HOST name another"
)
CALL_TIMEOUT_S: Final = 60.0
"""Timeout of a request, in seconds."""

NEGOTIATION_TIMEOUT_S: Final = 30
"""Timeout of a process's first request, which asks for the version of the engine's API."""

MAX_RESPONSE_BYTES: Final = 64 * 2**20
"""Where a response is cut off."""

MAX_CONNECTIONS: Final = 64
"""How many idle connections to an engine are kept."""


@lru_cache
def _make_client(address: EngineAddress, process: int) -> "docker.APIClient":
    """Return the SDK's client for an engine: one for each process, because forks must not share connections."""
    import docker
    from docker.errors import DockerException
    from docker.tls import TLSConfig

    class Client(docker.APIClient):
        """A client that knows no proxies and certificates for other addresses, from its first request on."""

        @property
        def trust_env(self) -> bool:
            return False

        @trust_env.setter
        def trust_env(self, value: bool) -> None:
            pass

    tls: TLSConfig | bool = False
    if address.certificates is not None:
        folder = Path(address.certificates)
        ca, cert, key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        tls = TLSConfig(
            client_cert=(cert, key) if os.path.exists(cert) else None,
            ca_cert=ca if os.path.exists(ca) else None,
            verify=address.verify,
        )
    try:
        client = Client(address.url, "auto", NEGOTIATION_TIMEOUT_S, tls, max_pool_size=MAX_CONNECTIONS)
    except DockerException as error:
        raise ConnectionError(str(error)) from error
    client.timeout = round(CALL_TIMEOUT_S)
    return client


@dataclass(frozen=True, slots=True)
class DockerEngine:
    """A Docker engine; threads and forks can share it."""

    address: EngineAddress

    @classmethod
    def find(cls) -> "DockerEngine":
        """Return the engine named by DOCKER_HOST, the current context or the default socket.

        Raises:
            ConfigurationError: The address is invalid or not supported.
            EngineUnavailableError: The current context does not exist.
        """
        return cls(find_engine())

    def client(self) -> "docker.APIClient":
        """Return the Docker SDK's client, which all threads of this process share.

        Raises:
            ConfigurationError: The Docker SDK is not installed.
            EngineUnavailableError: The engine does not respond.
        """
        with (
            installed_with("docker", "the Docker SDK", "docker"),
            self._translate_errors("GET /version", NEGOTIATION_TIMEOUT_S),
        ):
            if (parts := urlsplit(self.address.url)).scheme == "unix":
                with socket.socket(socket.AF_UNIX) as probe:  # the SDK leaks its own if it cannot connect
                    probe.settimeout(NEGOTIATION_TIMEOUT_S)
                    probe.connect(parts.path)
            return _make_client(self.address, os.getpid())

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
        data = self._request(method, path, query, body, timeout_s)
        try:
            return json.loads(data) if data.strip() else None
        except ValueError as error:
            raise EngineUnavailableError(
                f"expected JSON from the Docker engine for {method} {path}, got {data[:1000]!r}"
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

    def remove(self, container: str, *, grace_s: float = 0.0, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Remove a container with its anonymous volumes; return whether there was one.

        Args:
            container: Id or name of the container.
            grace_s: Seconds that its processes have to end, before they are killed.
            timeout_s: Timeout of the removal in seconds, also of one in progress.
        """
        path, deadline = f"/containers/{container}", time.monotonic() + timeout_s
        try:
            if grace_s > 0:
                stop = {"t": math.ceil(grace_s)}
                self.call("POST", f"{path}/stop", query=stop, timeout_s=grace_s + CALL_TIMEOUT_S)
            while True:
                try:
                    self.call("DELETE", path, query={"force": True, "v": True}, timeout_s=timeout_s)
                    return True
                except EngineRefusedError as error:
                    # 409: another removal is in progress; wait for it.
                    if error.status != 409 or time.monotonic() > deadline:
                        raise
                time.sleep(0.05)
        except EngineRefusedError as error:
            if error.status == 404:
                return False
            raise

    def logs(self, container: str, tail: int) -> bytes:
        """Return the last lines of a container's output, both streams interleaved."""
        query = {"stdout": True, "stderr": True, "tail": tail}
        data = self._request("GET", f"/containers/{container}/logs", query, None, CALL_TIMEOUT_S)
        if data[:1] > b"\2" or data[1:4] != b"\0\0\0":  # a terminal's output is not divided into pieces
            return data
        pieces, at = list[bytes](), 0
        while at < len(data):  # before each piece: its stream, three zeros, its length
            begin, at = at + 8, at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
            pieces.append(data[begin:at])
        return b"".join(pieces)

    def archive(self, container: str, path: str) -> bytes:
        """Return a file or folder of a container as a tar archive. Raises `EngineRefusedError` (404) if missing."""
        return self._request("GET", f"/containers/{container}/archive", {"path": path}, None, CALL_TIMEOUT_S)

    def put_archive(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar archive in a container's folder. Raises `EngineRefusedError` (404) if it is missing."""
        query = {"path": path, "noOverwriteDirNonDir": "true"}
        self._request("PUT", f"/containers/{container}/archive", query, archive, CALL_TIMEOUT_S)

    def create_exec(self, container: str, command: Sequence[str], **settings: Any) -> str:
        """Prepare a command in a container, to be run by `attach`; return its id.

        Args:
            container: Id of the container.
            command: The program and its arguments.
            settings: The engine's settings of an exec: `User`, `WorkingDir`, `Env`, `AttachStdin` etc.

        Raises:
            EngineUnavailableError: The engine does not respond.
            EngineRefusedError: The engine rejected the request, for example because the container is not running.
        """
        body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command), **settings}
        return str(self.call("POST", f"/containers/{container}/exec", body=body)["Id"])

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
            settings: As in `create_exec`.

        Raises:
            EngineUnavailableError: The engine does not respond.
            EngineRefusedError: The engine rejected the request, for example because the container is not running.
        """
        exec_id = self.create_exec(container, command, **settings)
        output = bytearray()

        async def read_all() -> bool:
            async with asyncio.timeout(timeout_s):
                reader, writer = await attach(self.address, exec_id)
            with closing(writer), suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while len(output) < most and (piece := await reader.read_any()):
                        output.extend(piece)
                    return len(output) < most
            return False

        with self._translate_errors(f"POST /exec/{exec_id}/start", timeout_s):
            ended = run_async_safely(read_all())
        if not ended:
            return EngineExecution(bytes(output), None, len(output) >= most)
        exit_code = self.call("GET", f"/exec/{exec_id}/json")["ExitCode"]
        return EngineExecution(bytes(output), int(exit_code), False)

    def ended_for_memory(self, container: str, since: float, until: float) -> bool:
        """Whether the OOM killer killed a process of the container between two Unix times."""
        query = {
            "since": f"{since:.3f}",
            "until": f"{until:.3f}",
            "filters": {"container": [container], "event": ["oom"], "type": ["container"]},
        }
        try:
            return bool(self._request("GET", "/events", query, None, 5.0).strip())
        except EngineUnavailableError:
            return False

    def _request(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Any, timeout_s: float
    ) -> bytes:
        """Send a request; a body of bytes is a tar archive, any other is sent as JSON. Raises as `call` does."""
        client = self.client()
        # The SDK's own methods have one timeout for all requests; its session takes one for each.
        url = f"{client.base_url}/v{client.api_version}{quote(path)}"
        # The engine expects JSON in values other than text.
        params = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in (query or {}).items()
        }
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        with (
            self._translate_errors(f"{method} {path}", timeout_s),
            client.request(method, url, params=params, timeout=timeout_s, stream=True, **content) as response,
        ):
            data = bytearray()
            for piece in response.iter_content(1 << 16):
                data += piece
                if len(data) >= MAX_RESPONSE_BYTES:
                    break
        if response.status_code >= 300 and response.status_code != 304:
            raise _refusal(f"{method} {path}", response.status_code, bytes(data))
        return bytes(data)

    @contextmanager
    def _translate_errors(self, request: str, timeout_s: float) -> Iterator[None]:
        """Convert exceptions of a request to `EngineUnavailableError` with a clear message."""
        try:
            yield
        except OSError as error:
            # What the system says is in the innermost error; the SDK and its libraries wrap it.
            cause: BaseException | None = error
            while cause is not None:
                error = cause if isinstance(cause, OSError) else error
                cause = cause.__cause__ or cause.__context__
            raise self._unavailable(request, timeout_s, error) from error

    def _unavailable(self, request: str, timeout_s: float, error: BaseException) -> EngineUnavailableError:
        if isinstance(error, PermissionError):
            return EngineUnavailableError(
                f"expected to be let in by the Docker engine at {self.address.url}, got: {error}; "
                "add yourself to its group (`sudo usermod -aG docker $USER`, then log in again)"
            )
        if isinstance(error, TimeoutError):
            return EngineUnavailableError(
                f"expected the Docker engine at {self.address.url} to answer {request} "
                f"within {timeout_s:g} s, got nothing; see its log"
            )
        return EngineUnavailableError(
            f"expected a Docker engine at {self.address.url}, got {type(error).__name__}: {error}; {HOW_TO}"
        )


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


def _refusal(request: str, status: int, answer: bytes) -> EngineRefusedError:
    try:
        text = str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        text = answer[:1000].decode(errors="replace").strip()
    return EngineRefusedError(
        f"expected the Docker engine to do {request}, got {status}: {text}", status, text
    )
