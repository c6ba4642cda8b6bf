"""What the code interpreter raises besides the core's `EpisodeOver`. What code does is never among it."""

from openenv_core.errors import EnvironmentFailure


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value that cannot be. The episode before goes on."""
