"""The processes that host environments.

from servers import create_app

app = create_app(BlackjackEnvironment, BlackjackAction, BlackjackObservation, max_concurrent_envs=64)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servers.app import create_app, create_fastapi_app

__all__ = ["create_app", "create_fastapi_app"]


def __getattr__(name: str) -> Any:
    # The web framework is imported on first use: `ropewalk --help` imports this package too.
    if name in __all__:
        from servers import app

        return getattr(app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
