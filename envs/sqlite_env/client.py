"""The client of the SQLite environment."""

from openenv_core.worlds import WorldClient

from .models import SqliteObservation, SqliteState


class SqliteEnv(WorldClient):
    """A session on a server of the SQLite environment; see `WorldClient`."""

    state_type = SqliteState
    reset_type = SqliteObservation
    # The package is named envs.sqlite_env in this repository and sqlite_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
