"""The container backend: one container per session from a warm pool, with an image that serves a coding environment."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from openenv_core.errors import (
    ClientError,
    ConfigurationError,
    ConnectionLostError,
    ProviderError,
    RequestTimeoutError,
    ServerError,
)
from openenv_core.providers.docker.container import Container, ContainerState
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.providers.pool import DockerPool, PoolLease
from openenv_core.sandbox import Execution, FileRefusedError, Limits

from ...client import CodeInterpreterEnv
from ...models import CodeInterpreterObservation
from ..settings import MINIMUM, PREFIX
from .hosted import (
    MAX_REPLY_BYTES,
    HostedBackend,
    HostedInterpreter,
    HostFailureError,
    InsideCall,
    NoAnswerError,
)
from .outputs import OutputCollector, make_stopped_execution

IMAGE: Final = f"{PREFIX}CONTAINER_IMAGE"
SIZE: Final = f"{PREFIX}CONTAINERS"
MEMORY: Final = f"{PREFIX}CONTAINER_MEMORY"
CPUS: Final = f"{PREFIX}CONTAINER_CPUS"

EXIT_WAIT_S: Final = 5.0
"""How long to wait for a container's exit state after its connection broke."""

CLOSE_TIMEOUT_S: Final = 2.0
"""How long a container may take to close its session before it is stopped."""

_POLL_INTERVAL_S: Final = 0.05
_MIB: Final = 1 << 20


def _default_options() -> ContainerOptions:
    return ContainerOptions(network="none", memory="1g", cpus=1.0, stop_timeout_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """The containers of one server.

    Attributes:
        image: Name or id of an image that serves this environment, or another OpenEnv environment that runs code. It
            is not pulled.
        size: The number of containers, warm or in use, and so the maximum number of sessions.
        options: Options of each container; by default no network, 1 GB of memory, one CPU, and no privileges.
        lease_s: Seconds that a session waits for a container.
        slack_s: Seconds that a reply may take beyond the time limit of the code.

    Raises:
        ConfigurationError: A value is invalid.
    """

    image: str
    size: int = 4
    options: ContainerOptions = field(default_factory=_default_options)
    lease_s: float = 60.0
    slack_s: float = 20.0

    def __post_init__(self) -> None:
        if not self.image:
            raise ConfigurationError(f"expected the name of an image in {IMAGE}, got nothing; set it")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigurationError(f"expected at least 1 container, got {self.size!r}")


def backend_from_environment(environ: Mapping[str, str]) -> "ContainerBackend":
    """Return the backend that CODE_INTERPRETER_CONTAINER_IMAGE and the related variables describe.

    This server's minimum isolation is passed on to the server in each container.

    Raises:
        ConfigurationError: No image is set, or a value is invalid.
    """
    image, size, memory, cpus, minimum = (
        environ.get(name, "").strip() for name in (IMAGE, SIZE, MEMORY, CPUS, MINIMUM)
    )
    try:
        options = ContainerOptions(
            network="none",
            memory=memory or "1g",
            cpus=float(cpus or 1),
            stop_timeout_s=0.0,
            env_vars={MINIMUM: minimum} if minimum else {},
        )
        return ContainerBackend(ContainerSettings(image=image, size=int(size or 4), options=options))
    except ConfigurationError:
        raise
    except ValueError:
        raise ConfigurationError(f"expected numbers in {SIZE} and {CPUS}, got {size!r}, {cpus!r}") from None


class _ContainerInterpreter(HostedInterpreter):
    """One container, and one session of the server in it.

    If the image serves this environment, its server handles limits, files, standard input and results. Any other server
    that runs code and returns its output is sent only code: timeouts are enforced here by discarding the container, and
    files are accessed by running code, if possible.
    """

    def __init__(
        self, pool: DockerPool, settings: ContainerSettings, limits: Limits, packages: tuple[str, ...]
    ) -> None:
        super().__init__(limits, packages, isolation="container", report_files=False)
        self._pool = pool
        self._settings = settings
        self._lease: PoolLease[Container] | None = None
        self._client: CodeInterpreterEnv | None = None
        self._is_our_server = False

    async def _begin(self) -> None:
        await self._end()
        image = self._settings.image
        try:
            self._lease = await asyncio.to_thread(self._pool.lease, self._settings.lease_s)
            self._client = client = self._make_client(self._lease)
            first = (await client.reset()).observation
            self._is_our_server = first.isolation != ""
            if self._is_our_server:
                await client.reset(packages=list(self._packages), limits=asdict(self._limits))
        except ServerError as error:
            # The image may allow fewer packages or lower ceilings.
            raise ConfigurationError(f"expected {image} to begin a session, got: {error}") from error
        except (ClientError, ProviderError) as error:
            raise HostFailureError(f"expected a container of {image}, got: {error}") from error
        try:
            await self._enter(own_folder=False)
        except NoAnswerError:
            if self._is_our_server or self._packages:
                raise
            self._root = ""  # this server cannot access files

    async def _end(self) -> None:
        client, self._client = self._client, None
        lease, self._lease = self._lease, None
        try:
            if client is not None:
                with suppress(ClientError, ProviderError, TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await client.close()
        finally:
            if lease is not None:
                lease.close()

    async def _run(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        if stdin is not None and not self._is_our_server:
            raise HostFailureError(f"{self._settings.image} knows code alone, and no standard input for it")
        try:
            observation = await self._execute(code, timeout_s, stdin)
        except (RequestTimeoutError, TimeoutError):
            if self._is_our_server:  # its own timeout should have come first
                raise HostFailureError("the server in the container is silent", state_lost=True) from None
            reason = f"it took longer than {timeout_s:g} s, and its container was given up"
            return make_stopped_execution("timeout", reason, state_lost=True)
        except ConnectionLostError as error:
            return await self._explain_end(error)
        except ServerError as error:
            raise HostFailureError(f"the server in the container failed: {error}") from error
        except ClientError as error:
            raise HostFailureError(str(error), state_lost=True) from error
        return _to_execution(observation, collector)

    async def _call_inside(self, call: InsideCall, timeout_s: float) -> str:
        if not self._root and call.function != "begin":
            raise NoAnswerError(f"{self._settings.image} knows code alone, and no files")
        try:
            observation = await self._execute(
                call.expression if self._is_our_server else call.statement, timeout_s, None
            )
        except (ClientError, TimeoutError) as error:
            raise HostFailureError(f"expected the container to see to its files, got: {error}") from error
        return (observation.result or "") if self._is_our_server else observation.stdout

    async def _put(self, path: str, data: bytes) -> None:
        if not self._is_our_server:
            await super()._put(path, data)
            return
        try:
            observation = (await self._require_client().put_file(path, data)).observation
        except ClientError as error:
            raise HostFailureError(f"expected the container to take a file, got: {error}") from error
        if observation.status == "sandbox_error":
            failure = f"expected the container to take a file, got: {observation.reason}"
            raise HostFailureError(failure, state_lost=observation.state_lost)
        if observation.error is not None:
            raise FileRefusedError(path, _refusal_reason(observation.error.evalue))

    async def _get(self, path: str) -> bytes:
        if not self._is_our_server:
            return await super()._get(path)
        try:
            return await self._require_client().get_file(path)
        except FileNotFoundError as error:
            raise FileRefusedError(path, _refusal_reason(str(error))) from None
        except ClientError as error:
            raise HostFailureError(f"expected the container to give a file, got: {error}") from error

    async def _execute(self, code: str, timeout_s: float, stdin: str | None) -> CodeInterpreterObservation:
        client = self._require_client()
        # A server of ours enforces the timeout itself.
        slack_s = self._settings.slack_s if self._is_our_server else 0.0
        async with asyncio.timeout(timeout_s + slack_s):
            result = await client.execute(
                code, timeout_s=timeout_s if self._is_our_server else None, stdin=stdin
            )
        return result.observation

    async def _explain_end(self, error: ConnectionLostError) -> Execution:
        """Return how code ended whose container died: running out of memory is the code's fault, anything else is not.

        Raises:
            HostFailureError: The container is running, its state is unknown, or it did not run out of memory.
        """
        state = None if self._lease is None else await asyncio.to_thread(_wait_end_state, self._lease)
        if state is None:
            raise HostFailureError(str(error), state_lost=True) from error
        if not state.out_of_memory:
            raise HostFailureError(f"the container {state}", state_lost=True) from error
        return make_stopped_execution("memory", f"the container {state}", state_lost=True)

    def _make_client(self, lease: PoolLease[Container]) -> CodeInterpreterEnv:
        limits = self._limits
        # JSON may escape each byte of text as six; images are base64 already.
        max_bytes = (
            6 * 2 * limits.output_bytes + 2 * limits.outputs_bytes + 2 * limits.file_bytes + MAX_REPLY_BYTES
        )
        return CodeInterpreterEnv(
            base_url=lease.url,
            message_timeout_s=limits.timeout_s + limits.grace_s + self._settings.slack_s,
            max_message_size_mb=max_bytes / _MIB,
            token=self._settings.options.token,
        )

    def _require_client(self) -> CodeInterpreterEnv:
        if self._client is None:
            raise HostFailureError("there is no container", state_lost=True)
        return self._client


_END_FIELDS: Final = (
    "status",
    "exit_code",
    "error",
    "state_lost",
    "reason",
    "signal",
    "max_rss_bytes",
    "files",
)


def _to_execution(observation: CodeInterpreterObservation, collector: OutputCollector) -> Execution:
    """Convert the observation of the server in the container; output goes into the collector."""
    collector.write("stdout", observation.stdout)
    collector.write("stderr", observation.stderr)
    for output in observation.outputs:
        collector.show(output.output_type, output.data, output.metadata)
    collector.note_loss(*(name for name, cut in asdict(observation.cut).items() if cut))
    end_fields: dict[str, Any] = {name: getattr(observation, name) for name in _END_FIELDS}
    return Execution(**end_fields)


def _wait_end_state(lease: PoolLease[Container]) -> ContainerState | None:
    """Wait for a container's exit state; None if it is still running or its state is unknown."""
    deadline = time.monotonic() + EXIT_WAIT_S
    with suppress(ProviderError):
        while time.monotonic() < deadline:
            state = lease.container.end_state()
            if not state.running:
                return state
            time.sleep(_POLL_INTERVAL_S)
    return None


def _refusal_reason(refusal: str) -> str:
    """Return why the server in the container rejected a file, without the prefix that is added again here."""
    return refusal.rpartition(": ")[2]


class ContainerBackend(HostedBackend):
    """Runs code in containers, one per session, never reused.

    The container isolates the code, together with the isolation of the server inside it: an image of this environment
    enforces its own level, other images guarantee none.
    """

    isolation = "container"

    def __init__(self, settings: ContainerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._pool: DockerPool | None = None

    async def _connect(self) -> None:
        settings = self._settings
        self._pool = pool = DockerPool(settings.image, settings.size, options=settings.options)
        try:
            await asyncio.to_thread(pool.wait, 1, settings.lease_s)
        except ProviderError as error:
            raise HostFailureError(f"expected containers of {settings.image}, got: {error}") from error

    def _make_interpreter(self, limits: Limits, packages: tuple[str, ...]) -> _ContainerInterpreter:
        assert self._pool is not None  # it was started
        return _ContainerInterpreter(self._pool, self._settings, limits, packages)

    async def _disconnect(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.close)
