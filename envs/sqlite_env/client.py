"""The client of a server of the database world."""

from openenv_core.worlds import WorldClient

from .models import SqliteObservation, SqliteState


class SqliteEnv(WorldClient):
    """Plays the database world behind a server; see `WorldClient`."""

    state_type = SqliteState
    reset_type = SqliteObservation
    # The folder goes by two names, envs.sqlite_env here and sqlite_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
