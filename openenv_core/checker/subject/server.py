"""A server that the checker started: it can be killed and started again."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from openenv_core.checker.outcomes import CheckFailed, NotApplicable
from openenv_core.errors import ProviderError


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
            CheckFailed: It does not become healthy.
        """
        if self._stopped:
            raise NotApplicable("the checker is coming to its end")
        provider = self._provider = self._provider_of()
        try:
            self._url = provider.start()
        except ProviderError as error:
            provider.stop()
            raise CheckFailed(
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
            NotApplicable: The server runs in a container, whose processes are not this machine's to look at.
        """
        import psutil

        guard = getattr(self._provider, "pid", None)
        if guard is None:
            raise NotApplicable("the processes of a container are not this machine's to look at")
        with suppress(psutil.NoSuchProcess):
            return tuple(child.pid for child in psutil.Process(guard).children(recursive=True))
        return ()

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
            CheckFailed: It does not become healthy.
        """
        if self._provider is not None:
            self._provider.stop()
        self.start()
