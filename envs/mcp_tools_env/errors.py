"""What the environment raises besides the core's `EpisodeOver`. What a tool does is never among it."""

from openenv_core.errors import EnvironmentFailure


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value that cannot be. The episode before goes on."""
