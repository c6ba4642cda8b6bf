"""Opens containers of a warm pool."""

import asyncio

from openenv_core.errors import ProviderError
from openenv_core.providers.pool import DockerPool
from openenv_core.sandbox import Limits, SandboxUnavailable

from ..hosted.opening import Opened, refuse_snapshots
from .interpreter import ContainerInterpreter
from .settings import ContainerSettings


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
            SandboxUnavailable: There is no engine, no such image, or its server does not start.
        """
        settings = self._settings
        self._pool = pool = DockerPool(settings.image, settings.size, options=settings.options)
        try:
            await asyncio.to_thread(pool.wait, 1, settings.lease_s)
        except ProviderError as error:
            await self.close()
            raise SandboxUnavailable(f"expected containers of {settings.image}, got: {error}") from error

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> ContainerInterpreter:
        """Take a container; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._pool is None:
            raise SandboxUnavailable(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(ContainerInterpreter(self._pool, self._settings, limits, packages))

    async def close(self) -> None:
        """Remove all containers. Idempotent."""
        await self._opened.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.close)
