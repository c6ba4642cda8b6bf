"""Opens kernels of a gateway."""

from openenv_core.sandbox import Limits, SandboxUnavailable

from ..hosted import HostFailure
from ..hosted.opening import Opened, refuse_snapshots
from .gateway import Gateway
from .interpreter import JupyterInterpreter
from .settings import JupyterSettings


class JupyterBackend:
    """Runs code in the kernels of a Jupyter kernel gateway, one a session.

    A gateway isolates nothing: a session's code can do whatever the gateway's user can, to the other sessions' kernels
    and folders too. Time and output are bounded here; memory, disk, processes and network are not. It is for code
    that is trusted, or for gateways that put each kernel into a container of its own.

    Args:
        settings: How the gateway is reached.
    """

    isolation = "remote"

    def __init__(self, settings: JupyterSettings) -> None:
        self._settings = settings
        self._gateway: Gateway | None = None
        self._opened: Opened[JupyterInterpreter] = Opened()

    async def start(self) -> None:
        """Ask the gateway for its kernels, which shows that the token is good.

        Raises:
            SandboxUnavailable: It does not answer, refuses the token, or has none of the name.
        """
        self._gateway = Gateway(self._settings)
        try:
            await self._gateway.check()
        except HostFailure as failure:
            await self.close()
            raise SandboxUnavailable(str(failure)) from failure

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> JupyterInterpreter:
        """Start a kernel; see `Backend`."""
        refuse_snapshots(snapshot)
        if self._gateway is None:
            raise SandboxUnavailable(
                "expected a backend that was started, got one that was not, or was closed"
            )
        return await self._opened.add(JupyterInterpreter(self._gateway, self._settings, limits, packages))

    async def close(self) -> None:
        """End all kernels that were opened. Idempotent."""
        await self._opened.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()
