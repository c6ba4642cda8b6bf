"""Questions about an SQLite database as an environment: the models and the client. The server is in :mod:`.server`."""

from openenv_core.tasks import InvalidResetOptionError

from .client import SqliteEnv
from .models import SqliteObservation, SqliteState

__all__ = ["InvalidResetOptionError", "SqliteEnv", "SqliteObservation", "SqliteState"]
