"""Who may come in: what is checked of a connection before anything else."""

from starlette.types import ASGIApp, Receive, Scope, Send

from servers.settings import ServerSettings

__all__ = ["Guard"]


class Guard:
    """Lets every connection in, as nobody in particular.

    Args:
        app: What is guarded.
        settings: The server's settings.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        scope["ropewalk.principal"] = ""
        await self._app(scope, receive, send)
