"""What can go wrong around a tool, beside what the tool itself does."""

from openenv_core.errors import EnvironmentFailure


class ToolFailed(EnvironmentFailure):
    """Raised by a tool that cannot do what it was asked; its text is what the caller is told."""


class ToolUnavailable(EnvironmentFailure):
    """Raised by a tool where something beside the caller failed: it tells nothing of the policy."""


class InvalidArguments(EnvironmentFailure):
    """The arguments are not those that a tool or a prompt takes."""


class NoSuchTool(EnvironmentFailure):
    """There is no tool of that name."""


class NoSuchResource(EnvironmentFailure):
    """There is no resource at that address."""


class NoSuchPrompt(EnvironmentFailure):
    """There is no prompt of that name."""


class AskingUnavailable(EnvironmentFailure):
    """Nobody is there to answer: the caller of a tool cannot be asked back."""
