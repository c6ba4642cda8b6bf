"""Tool calls as actions and observations of `step`: calls, results and errors."""

from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from openenv_core.errors import EnvironmentFailureError
from openenv_core.types import Action, Observation

RESERVED_TOOL_NAMES: Final = frozenset({"reset", "step", "state", "close"})
"""Names that no tool may have, because a client has methods of these names."""


class Tool(BaseModel):
    """One tool of a listing.

    Attributes:
        input_schema: JSON schema of the arguments.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    name: str
    description: str
    input_schema: dict[str, Any]


class ToolErrorType(StrEnum):
    """Types of failures of a call."""

    EXECUTION_ERROR = "execution_error"
    INVALID_ARGS = "invalid_args"
    TRANSPORT_ERROR = "transport_error"
    TOOL_NOT_FOUND = "tool_not_found"
    TIMEOUT = "timeout"


class ToolError(BaseModel):
    """Why a call failed."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    error_type: ToolErrorType
    message: str


class ListToolsAction(Action):
    """Lists the tools."""

    type: Literal["list_tools"] = "list_tools"


class CallToolAction(Action):
    """Calls a tool."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ListToolsObservation(Observation):
    """The list of tools."""

    tools: list[Tool]


class CallToolObservation(Observation):
    """A tool's result, or why the call failed.

    Attributes:
        result: The tool's value, even if it describes an error; None if the call failed.
    """

    tool_name: str
    result: Any = None
    error: ToolError | None = None


ToolAction: TypeAlias = ListToolsAction | CallToolAction
"""Actions of a tool environment."""

ToolObservation: TypeAlias = ListToolsObservation | CallToolObservation
"""Observations of a tool environment."""


class ToolFailedError(EnvironmentFailureError):
    """Raised by a tool that cannot do what the caller asked for; its text is sent to the caller."""


class ToolUnavailableError(EnvironmentFailureError):
    """Raised by a tool if the infrastructure failed, so that the policy is not to blame."""


class InvalidArgumentsError(EnvironmentFailureError):
    """The arguments of a tool or prompt are invalid."""


class NoSuchResourceError(EnvironmentFailureError):
    """There is no resource at that URI."""


class NoSuchPromptError(EnvironmentFailureError):
    """There is no prompt of that name."""


class AskingUnavailableError(EnvironmentFailureError):
    """The caller of a tool cannot answer questions."""
