"""What the database world raises besides the core's `EpisodeOver`."""

from openenv_core.errors import EnvironmentFailure
from openenv_core.tools import ToolFailed


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value that cannot be. The episode before goes on."""


class QueryRefused(ToolFailed):
    """A query was not run, or not to its end. The message is for whoever wrote it."""
