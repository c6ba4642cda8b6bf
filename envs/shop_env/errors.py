"""What the shop raises besides the core's `EpisodeOver`."""

from openenv_core.errors import EnvironmentFailure
from openenv_core.tools import ToolFailed


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value that cannot be. The episode before goes on."""


class Impossible(ToolFailed):
    """The desk cannot do what it was asked: there is no such thing, or it is nobody's business here."""
