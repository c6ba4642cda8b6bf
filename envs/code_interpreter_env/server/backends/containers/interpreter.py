"""Containers of a warm pool as sessions' interpreters."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
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
from openenv_core.providers.pool import DockerPool, PoolLease
from openenv_core.sandbox import FileRefusedError, Limits, SandboxUnavailableError
from openenv_core.sandbox.results import EXIT_KILLED

from ....client import CodeInterpreterEnv
from ....models import CodeInterpreterObservation
from ..hosted import Collector, ExecutionEnd, HostedInterpreter, HostFailureError
from ..hosted.collector import ErrandUnansweredError
from ..hosted.errand import MOST_BYTES, Errand, checked_path
from ..hosted.interpreter import Opened, overdue, refuse_snapshots
from .settings import ContainerSettings

MIB: Final = 1 << 20

EXIT_WAIT_S: Final = 5.0
"""How long the end of a container may take to show after its connections broke."""

POLL_INTERVAL_S: Final = 0.05

CLOSE_TIMEOUT_S: Final = 2.0
"""How long a container gets to end its session before it is ended itself."""


class ContainerInterpreter(HostedInterpreter):
    """One container, one session of the server in it.

    Where the image serves this environment, limits, files, standard input and results are the server's there. Any
    other that takes code and answers with what it printed is spoken to with code alone: a time-out is kept from here,
    by giving the container up, and there are files as far as its Python can be asked for them.

    Args:
        pool: Where containers come from.
        settings: What a session waits for.
        limits: Of the session.
        packages: Imported at the start.
    """

    def __init__(
        self, pool: DockerPool, settings: ContainerSettings, limits: Limits, packages: tuple[str, ...]
    ) -> None:
        super().__init__(limits, packages, isolation="container", report_files=False)
        self._pool = pool
        self._settings = settings
        self._lease: PoolLease[Container] | None = None
        self._client: CodeInterpreterEnv | None = None
        self._ours = False

    async def _begin(self) -> None:
        await self._end()
        try:
            self._lease = await asyncio.to_thread(self._pool.lease, self._settings.lease_s)
            self._client = client = self._made_client(self._lease)
            first = (await client.reset()).observation
            self._ours = first.isolation != ""
            if self._ours:
                await client.reset(packages=list(self._packages), limits=asdict(self._limits))
        except ServerError as error:
            # It is what the image allows: fewer packages, lower ceilings.
            raise ConfigurationError(
                f"expected {self._settings.image} to begin a session, got: {error}"
            ) from error
        except (ClientError, ProviderError) as error:
            raise HostFailureError(f"expected a container of {self._settings.image}, got: {error}") from error
        try:
            await self._enter(own_folder=False)
        except ErrandUnansweredError:
            if self._ours or self._packages:
                raise
            self._root = ""  # code is all that it takes

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
        self, code: str, collector: Collector, timeout_s: float, stdin: str | None
    ) -> ExecutionEnd:
        if stdin is not None and not self._ours:
            raise HostFailureError(f"{self._settings.image} knows code alone, and no standard input for it")
        try:
            seen = await self._executed(code, timeout_s, stdin)
        except (RequestTimeoutError, TimeoutError):
            if self._ours:  # its own time-out should have come first
                raise HostFailureError(
                    "the server in the container does not answer", state_lost=True
                ) from None
            reason = f"it took longer than {timeout_s:g} s, and its container was given up"
            return overdue(reason, state_lost=True)
        except ConnectionLostError as error:
            return await self._after_the_end(error)
        except ServerError as error:
            raise HostFailureError(f"the server in the container failed: {error}") from error
        except ClientError as error:
            raise HostFailureError(str(error), state_lost=True) from error
        return _verdict(seen, collector)

    async def _ask(self, errand: Errand, timeout_s: float) -> str:
        if not self._root and errand.verb != "begin":
            raise ErrandUnansweredError(f"{self._settings.image} knows code alone, and no files")
        try:
            code = errand.expression if self._ours else errand.statement
            seen = await self._executed(code, timeout_s, None)
        except (ClientError, TimeoutError) as error:
            raise HostFailureError(f"expected the container to see to its files, got: {error}") from error
        return (seen.result or "") if self._ours else seen.stdout

    async def _put(self, path: str, data: bytes) -> None:
        if not self._ours:
            await super()._put(path, data)
            return
        client = self._require_client()
        try:
            seen = (await client.put_file(path, data)).observation
        except ClientError as error:
            raise HostFailureError(f"expected the container to take a file, got: {error}") from error
        _require_taken(path, seen)

    async def get_file(self, path: str) -> bytes:
        """Return a file's content; see `Interpreter`."""
        if not self._ours:
            return await super().get_file(path)
        place = checked_path(path)
        async with self._turn:
            await self._ready()
            client = self._require_client()
            try:
                return await client.get_file(place)
            except FileNotFoundError as error:
                raise FileRefusedError(path, _reason(str(error))) from None
            except ClientError as error:
                raise HostFailureError(f"expected the container to give a file, got: {error}") from error

    async def _executed(self, code: str, timeout_s: float, stdin: str | None) -> CodeInterpreterObservation:
        client = self._require_client()
        # A server of ours keeps the time itself.
        slack_s = self._settings.slack_s if self._ours else 0.0
        async with asyncio.timeout(timeout_s + slack_s):
            result = await client.execute(code, timeout_s=timeout_s if self._ours else None, stdin=stdin)
        return result.observation

    async def _after_the_end(self, error: ConnectionLostError) -> ExecutionEnd:
        """Return the verdict on code under which the container ended: its memory is the code's, all else is not."""
        state = None if self._lease is None else await asyncio.to_thread(_end_of, self._lease)
        if state is None:
            raise HostFailureError(str(error), state_lost=True) from error
        if not state.out_of_memory:
            raise HostFailureError(f"the container {state}", state_lost=True) from error
        return ExecutionEnd(
            status="memory", exit_code=EXIT_KILLED, state_lost=True, reason=f"the container {state}"
        )

    def _made_client(self, lease: PoolLease[Container]) -> CodeInterpreterEnv:
        limits = self._limits
        # Every byte of a text may be spelled with six, and images are text already.
        most = 6 * 2 * limits.output_bytes + 2 * limits.outputs_bytes + 2 * limits.file_bytes + MOST_BYTES
        return CodeInterpreterEnv(
            base_url=lease.url,
            message_timeout_s=limits.timeout_s + limits.grace_s + self._settings.slack_s,
            max_message_size_mb=most / MIB,
            token=self._settings.options.token,
        )

    def _require_client(self) -> CodeInterpreterEnv:
        if self._client is None:
            raise HostFailureError("there is no container", state_lost=True)
        return self._client


def _verdict(seen: CodeInterpreterObservation, collector: Collector) -> ExecutionEnd:
    collector.write("stdout", seen.stdout)
    collector.write("stderr", seen.stderr)
    for output in seen.outputs:
        collector.show(output.output_type, output.data, output.metadata)
    collector.lost(**asdict(seen.truncated))
    fields: dict[str, Any] = {
        name: getattr(seen, name)
        for name in (
            "status",
            "exit_code",
            "error",
            "state_lost",
            "reason",
            "signal",
            "max_rss_bytes",
            "files",
        )
    }
    return ExecutionEnd(**fields)


def _require_taken(path: str, seen: CodeInterpreterObservation) -> None:
    if seen.status == "ok":
        return
    if seen.status == "sandbox_error" or seen.error is None:
        raise HostFailureError(
            f"expected the container to take a file, got: {seen.reason}", state_lost=seen.state_lost
        )
    raise FileRefusedError(path, _reason(seen.error.evalue))


def _end_of(lease: PoolLease[Container]) -> ContainerState | None:
    """Return how a container ended, which takes a moment to show; None where it did not, or nobody knows."""
    deadline = time.monotonic() + EXIT_WAIT_S
    with suppress(ProviderError):
        while time.monotonic() < deadline:
            state = lease.container.end_state()
            if not state.running:
                return state
            time.sleep(POLL_INTERVAL_S)
    return None


def _reason(refusal: str) -> str:
    """Return why the server there refused a file, without what is said here once more."""
    return refusal.rpartition(": ")[2]


class ContainerBackend:
    """Runs code in containers, one a session, which nobody uses again.

    What stands between the code and the machine is the container, and within it what the server there has: an image
    of this environment answers for its own level, any other for nothing.

    Args:
        settings: Which containers.
    """

    isolation = "container"

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._pool: DockerPool | None = None
        self._opened: Opened[ContainerInterpreter] = Opened()

    async def start(self) -> None:
        """Fill the pool, and wait for its first container.

        Raises:
            SandboxUnavailableError: There is no engine, no such image, or its server does not start.
        """
        settings = self._settings
        self._pool = pool = DockerPool(settings.image, settings.size, options=settings.options)
        try:
            await asyncio.to_thread(pool.wait, 1, settings.lease_s)
        except ProviderError as error:
            await self.close()
            raise SandboxUnavailableError(f"expected containers of {settings.image}, got: {error}") from error

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> ContainerInterpreter:
        """Take a container; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._pool is None:
            raise SandboxUnavailableError(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(ContainerInterpreter(self._pool, self._settings, limits, packages))

    async def close(self) -> None:
        """Remove all containers. Idempotent."""
        await self._opened.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.close)
