"""The client of a negotiation server."""

from openenv_core import EnvClient, State

from .models import NegotiationAction, NegotiationObservation


class NegotiationEnv(EnvClient[NegotiationAction, NegotiationObservation, State]):
    """A session on a negotiation server: `reset` takes the seats that it plays, as `seat` (docs/players.md)."""

    action_type = NegotiationAction
    observation_type = NegotiationObservation
    state_type = State
    # The package is named envs.negotiation_env in this repository and negotiation_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
