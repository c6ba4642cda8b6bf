"""The servers of one environment: one that all checks share, and those that a check starts for itself."""

import io
import os
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from openenv_core.checker import inside
from openenv_core.checker.check import CheckError, NotApplicableError
from openenv_core.errors import OpenEnvError, ProviderError
from openenv_core.manifest import MANIFEST, Manifest, load_manifest
from openenv_core.targets import Target, provider_of


class RunningServer:
    """One server of the environment under test.

    Args:
        provider_of: Makes what starts it; called again for each restart.
    """

    def __init__(self, provider_of: Callable[[], Any]) -> None:
        self._provider_of = provider_of
        self._provider: Any = None
        self._stopped = False
        self._url = ""

    @property
    def url(self) -> str:
        """Where it is; another place after a restart."""
        return self._url

    @property
    def provider(self) -> Any:
        """What runs it."""
        return self._provider

    @property
    def container(self) -> Any:
        """The container that it runs in; None where it is processes of this machine."""
        return getattr(self._provider, "container", None)

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as its provider can tell."""
        return self._provider is not None and bool(getattr(self._provider, "alive", True))

    def output(self) -> str:
        """Return the last of what it printed."""
        return str(self._provider.output()) if hasattr(self._provider, "output") else ""

    def start(self) -> None:
        """Start it.

        Raises:
            CheckError: It does not become healthy.
        """
        if self._stopped:
            raise NotApplicableError("the checker is coming to its end")
        provider = self._provider = self._provider_of()
        try:
            self._url = provider.start()
        except ProviderError as error:
            provider.stop()
            raise CheckError(
                f"expected a server that starts, got: {error}",
                change="make the application importable and its server healthy: `ropewalk serve` with the same "
                "target shows what it prints",
            ) from error

    def stop(self) -> None:
        """Stop it for good. Idempotent."""
        self._stopped = True
        if self._provider is not None:
            self._provider.stop()

    def pids(self) -> tuple[int, ...]:
        """Return every process of the server, the environment's own children included.

        Raises:
            NotApplicableError: The server runs in a container, whose processes are not this machine's to look at.
        """
        guard = getattr(self._provider, "pid", None)
        if guard is None:
            raise NotApplicableError("the processes of a container are not this machine's to look at")
        return tuple(inside.descendants(guard))

    def kill(self) -> None:
        """End it at once, as an engine that runs out of memory would: SIGKILL to every process."""
        if (container := self.container) is not None:
            container.remove()
            return
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Start it anew, after whatever became of it; `url` is another afterwards.

        Raises:
            CheckError: It does not become healthy.
        """
        if self._provider is not None:
            self._provider.stop()
        self.start()


class Servers:
    """Starts servers and stops whatever it started. Safe to use from several threads.

    Args:
        target: What is served.
        start_timeout_s: Seconds until a server must be healthy.
    """

    def __init__(self, target: Target, start_timeout_s: float) -> None:
        self._target = target
        self._start_timeout_s = start_timeout_s
        self._lock = threading.RLock()
        self._running: list[RunningServer] = []
        self._shared: RunningServer | None = None
        self._start_failure: CheckError | None = None
        self._closed = False

    def shared(self) -> RunningServer:
        """Return the server of all checks, started when first asked for, and again when it has died.

        Raises:
            CheckError: It does not start.
        """
        with self._lock:
            if self._start_failure is not None:
                raise self._start_failure
            if self._shared is None or not self._shared.alive:
                first = self._shared is None
                server = self._shared = self._new()
                try:
                    server.start()
                except CheckError as failure:
                    if first:  # it would be the same for every check, each after as long a wait
                        self._start_failure = failure
                    raise
            return self._shared

    @contextmanager
    def own(
        self,
        env_vars: Mapping[str, str] | None = None,
        docker_options: Mapping[str, Any] | None = None,
        serve_options: Mapping[str, Any] | None = None,
    ) -> Iterator[RunningServer]:
        """Start another server, for as long as the block lasts.

        Args:
            env_vars: Environment variables of the server.
            docker_options: Fields of `ContainerOptions`, where the target is an image.
            serve_options: Options of `ropewalk serve` with underscores; an image has its own command.

        Raises:
            CheckError: It does not start.
        """
        server = self._new(env_vars, docker_options, serve_options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
            with self._lock:
                self._running.remove(server)

    def close(self) -> None:
        """Stop all of them. Idempotent."""
        self._closed = True
        for server in list(self._running):
            server.stop()

    def _new(
        self,
        env_vars: Mapping[str, str] | None = None,
        docker_options: Mapping[str, Any] | None = None,
        serve_options: Mapping[str, Any] | None = None,
    ) -> RunningServer:
        words = [
            word
            for name, value in (serve_options or {}).items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]

        def provider() -> Any:
            return provider_of(
                self._target,
                env_vars=env_vars,
                start_timeout_s=self._start_timeout_s,
                docker_options=docker_options,
                serve_options=tuple(words),
            )

        if self._closed:
            raise NotApplicableError("the checker is coming to its end")
        server = RunningServer(provider)
        with self._lock:
            self._running.append(server)
        return server


PLACE: Final = f"/app/env/{MANIFEST}"
"""Where images have it: ours, and those of the released package."""


def manifest_in(server: "RunningServer | None") -> Manifest:
    """Read the manifest in a container.

    Raises:
        ManifestError: It says what it cannot say.
        NotApplicableError: There is none.
    """
    from openenv_core.providers.docker.engine import DockerEngine

    container = None if server is None else getattr(server.provider, "container", None)
    if container is None:
        raise NotApplicableError("there is no container to look into")
    try:
        packed = DockerEngine.find().archive(container.id, PLACE)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = next((one for one in archive if one.isfile()), None)
            file = None if member is None else archive.extractfile(member)
            text = "" if file is None else file.read().decode("utf-8", "replace")
    except (OpenEnvError, tarfile.TarError) as error:
        raise NotApplicableError(f"the image has no {PLACE}: {error}") from error
    return load_manifest(text, PLACE)
