"""What BlackJack raises besides the core's `EpisodeOver`."""

from openenv_core.errors import EnvironmentFailure


class StepBeforeReset(EnvironmentFailure):
    """A step was asked for before the first reset, when no cards are on the table."""


class InvalidResetOption(EnvironmentFailure):
    """Reset was given an option that does not exist, or a value of the wrong type. No hand was dealt."""
