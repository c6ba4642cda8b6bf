"""The processes that host environments.

from servers import create_app

app = create_app(BlackjackEnvironment, BlackjackAction, BlackjackObservation, max_concurrent_envs=64)
"""

from servers.app import create_app

__all__ = ["create_app"]
