"""Opens sessions of the service."""

import asyncio

from openenv_core.sandbox import Limits, SandboxUnavailable

from ..hosted import HostFailure
from ..hosted.opening import Opened, refuse_snapshots
from .interpreter import TogetherInterpreter
from .service import TogetherService
from .settings import TogetherSettings


class TogetherBackend:
    """Runs code in sessions of Together's Code Interpreter.

    It speaks the interface as it is documented, and is tested against a server of ours that speaks it too. It has
    never been run against the service itself.

    Time and output are bounded here. Memory, disk, processes and network are what the service grants.

    Args:
        settings: How it is reached.
    """

    isolation = "remote"

    def __init__(self, settings: TogetherSettings) -> None:
        self._settings = settings
        self._service: TogetherService | None = None
        self._opened: Opened[TogetherInterpreter] = Opened()

    async def start(self) -> None:
        """Ask for the list of sessions, which shows that the token is good.

        Raises:
            SandboxUnavailable: The service does not answer, or refuses the token.
        """
        self._service = TogetherService(self._settings)
        try:
            await self._service.sessions()
        except HostFailure as failure:
            await self.close()
            raise SandboxUnavailable(str(failure)) from failure

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> TogetherInterpreter:
        """Begin a session; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._service is None:
            raise SandboxUnavailable(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(TogetherInterpreter(self._service, self._settings, limits, packages))

    async def close(self) -> None:
        """Let all sessions go; the service ends them after their time. Idempotent."""
        await self._opened.close()
        service, self._service = self._service, None
        if service is not None:
            await asyncio.shield(service.close())
