"""What the shop raises besides the core's `EpisodeOver`."""

from openenv_core.tasks import InvalidResetOption
from openenv_core.tools import ToolFailed

__all__ = ["Impossible", "InvalidResetOption"]


class Impossible(ToolFailed):
    """The desk cannot do what it was asked: there is no such thing, or it is nobody's business here."""
