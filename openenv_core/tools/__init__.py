"""Tools: their declaration in environments, tool calls as actions, and the interface for the server's MCP bridge.

Importing this package loads nothing heavier than pydantic; only the server imports the MCP SDK.
"""

from openenv_core.errors import make_former_getattr
from openenv_core.tools.context import SILENT, Elicit, LogLevel, Request, Roots, Sample, ToolContext
from openenv_core.tools.declare import completion, prompt, resource, tool
from openenv_core.tools.environment import DeclaredTools, ToolEnvironment, ToolHost, is_tool_host
from openenv_core.tools.results import (
    ArgumentCompletion,
    Audio,
    Content,
    ContentBlock,
    Embedded,
    Image,
    PromptMessage,
    PromptResult,
    ResourceContents,
    ResourceLink,
    Text,
    ToolResult,
)
from openenv_core.tools.specs import PromptArgument, PromptSpec, ResourceSpec, ResourceTemplateSpec, ToolSpec
from openenv_core.tools.toolset import Toolset
from openenv_core.tools.wire import (
    RESERVED_TOOL_NAMES,
    AskingUnavailableError,
    CallToolAction,
    CallToolObservation,
    InvalidArgumentsError,
    ListToolsAction,
    ListToolsObservation,
    NoSuchPromptError,
    NoSuchResourceError,
    NoSuchToolError,
    Tool,
    ToolAction,
    ToolError,
    ToolErrorType,
    ToolFailedError,
    ToolObservation,
    ToolUnavailableError,
)

__all__ = [
    "RESERVED_TOOL_NAMES",
    "SILENT",
    "ArgumentCompletion",
    "AskingUnavailableError",
    "Audio",
    "CallToolAction",
    "CallToolObservation",
    "Content",
    "ContentBlock",
    "DeclaredTools",
    "Elicit",
    "Embedded",
    "Image",
    "InvalidArgumentsError",
    "ListToolsAction",
    "ListToolsObservation",
    "LogLevel",
    "NoSuchPromptError",
    "NoSuchResourceError",
    "NoSuchToolError",
    "PromptArgument",
    "PromptMessage",
    "PromptResult",
    "PromptSpec",
    "Request",
    "ResourceContents",
    "ResourceLink",
    "ResourceSpec",
    "ResourceTemplateSpec",
    "Roots",
    "Sample",
    "Text",
    "Tool",
    "ToolAction",
    "ToolContext",
    "ToolEnvironment",
    "ToolError",
    "ToolErrorType",
    "ToolFailedError",
    "ToolHost",
    "ToolObservation",
    "ToolResult",
    "ToolSpec",
    "ToolUnavailableError",
    "Toolset",
    "completion",
    "is_tool_host",
    "prompt",
    "resource",
    "tool",
]

__getattr__ = make_former_getattr(
    globals(),
    {
        "AskingUnavailable": "AskingUnavailableError",
        "Completion": "ArgumentCompletion",
        "InvalidArguments": "InvalidArgumentsError",
        "Link": "ResourceLink",
        "Message": "PromptMessage",
        "NoSuchTool": "NoSuchToolError",
        "ToolFailed": "ToolFailedError",
        "ToolUnavailable": "ToolUnavailableError",
    },
)
