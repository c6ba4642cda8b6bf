"""Tool calls as actions and observations of `step`: calls, results and errors."""

from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from openenv_core.errors import EnvironmentFailureError
from openenv_core.types import Action, Observation

RESERVED_TOOL_NAMES: Final = frozenset({"reset", "step", "state", "close"})
"""What no tool may be called: a client has methods of these names."""


class Tool(BaseModel):
    """One tool, as it is listed.

    Attributes:
        input_schema: JSON schema of the arguments.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str
    input_schema: dict[str, Any]


class ToolErrorType(StrEnum):
    """How a call can fail."""

    EXECUTION_ERROR = "execution_error"
    INVALID_ARGS = "invalid_args"
    TRANSPORT_ERROR = "transport_error"
    TOOL_NOT_FOUND = "tool_not_found"
    TIMEOUT = "timeout"


class ToolError(BaseModel):
    """Why a call failed."""

    model_config = ConfigDict(extra="forbid")

    error_type: ToolErrorType
    message: str


class ListToolsAction(Action):
    """Asks which tools there are."""

    type: Literal["list_tools"] = "list_tools"


class CallToolAction(Action):
    """Asks a tool to run."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ListToolsObservation(Observation):
    """The tools that there are."""

    tools: list[Tool]


class CallToolObservation(Observation):
    """What a tool returned, or why it did not.

    Attributes:
        result: The tool's own value, also where that tells of an error; None where the call failed.
    """

    tool_name: str
    result: Any = None
    error: ToolError | None = None


ToolAction: TypeAlias = ListToolsAction | CallToolAction
"""What the step of an environment of tools takes."""

ToolObservation: TypeAlias = ListToolsObservation | CallToolObservation
"""What it answers."""


class ToolFailedError(EnvironmentFailureError):
    """Raised by a tool that cannot do what it was asked; its text is sent to the caller."""


class ToolUnavailableError(EnvironmentFailureError):
    """Raised by a tool where something beside the caller failed: it tells nothing of the policy."""


class InvalidArgumentsError(EnvironmentFailureError):
    """The arguments are not those that a tool or a prompt takes."""


class NoSuchToolError(EnvironmentFailureError):
    """There is no tool of that name."""


class NoSuchResourceError(EnvironmentFailureError):
    """There is no resource at that address."""


class NoSuchPromptError(EnvironmentFailureError):
    """There is no prompt of that name."""


class AskingUnavailableError(EnvironmentFailureError):
    """The caller of a tool cannot answer questions."""
