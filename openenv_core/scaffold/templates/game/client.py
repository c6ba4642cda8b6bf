"""The client of a Place Holder server."""

from openenv_core import EnvClient, State

from .models import PlaceHolderAction, PlaceHolderObservation


class PlaceHolderEnv(EnvClient[PlaceHolderAction, PlaceHolderObservation, State]):
    """Plays Place Holder on a server: at a URL, or started by `from_process()`."""

    action_type = PlaceHolderAction
    observation_type = PlaceHolderObservation
    state_type = State
    default_app = f"{__package__}.server.app:app"
