"""The client of a reasoning server."""

from openenv_core import EnvClient

from .models import ReasoningAction, ReasoningObservation, ReasoningState


class ReasoningEnv(EnvClient[ReasoningAction, ReasoningObservation, ReasoningState]):
    """A session on a reasoning server.

    Besides `seed` and `episode_id`, `reset` takes the options `dataset_name`, `dataset_config`, `dataset_specs`,
    `size`, `split` and `difficulty`; see :class:`.server.environment.ReasoningEnvironment`.
    """

    action_type = ReasoningAction
    observation_type = ReasoningObservation
    state_type = ReasoningState
    # The package is named envs.reasoning_env in this repository and reasoning_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
