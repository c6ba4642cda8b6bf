"""What the database world raises besides the core's `EpisodeOver`."""

from openenv_core.tasks import InvalidResetOption
from openenv_core.tools import ToolFailed

__all__ = ["InvalidResetOption", "QueryRefused"]


class QueryRefused(ToolFailed):
    """A query was not run, or not to its end. The message is for whoever wrote it."""
