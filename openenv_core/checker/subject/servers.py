"""The servers of one environment: one that all checks share, and those of their own."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openenv_core.checker.outcomes import CheckFailed, NotApplicable
from openenv_core.checker.subject.server import RunningServer
from openenv_core.targets import Target, provider_of


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
        self._start_failure: CheckFailed | None = None
        self._closed = False

    def shared(self) -> RunningServer:
        """Return the server of all checks, started when first asked for, and again when it has died.

        Raises:
            CheckFailed: It does not start.
        """
        with self._lock:
            if self._start_failure is not None:
                raise self._start_failure
            if self._shared is None or not self._shared.alive:
                first = self._shared is None
                server = self._shared = self._new()
                try:
                    server.start()
                except CheckFailed as failure:
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
            CheckFailed: It does not start.
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
            raise NotApplicable("the checker is coming to its end")
        server = RunningServer(provider)
        with self._lock:
            self._running.append(server)
        return server
