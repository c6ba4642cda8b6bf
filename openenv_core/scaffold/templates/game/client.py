"""The client of a Place Holder server."""

from openenv_core import EnvClient

from .models import PlaceHolderAction, PlaceHolderObservation, PlaceHolderState


class PlaceHolderEnv(EnvClient[PlaceHolderAction, PlaceHolderObservation, PlaceHolderState]):
    """Plays Place Holder on a server: at a URL, or started by `from_process()`."""

    action_type = PlaceHolderAction
    observation_type = PlaceHolderObservation
    state_type = PlaceHolderState
    default_app = f"{__package__}.server.app:app"
