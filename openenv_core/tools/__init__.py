"""Tools: what an environment of them declares, what a step carries, and what a server's bridge to MCP asks.

Importing this loads pydantic and nothing heavier; the MCP SDK is the server's.
"""

from openenv_core.tools.content import Audio, Content, ContentBlock, Embedded, Image, Link, Message, Text
from openenv_core.tools.context import SILENT, Elicit, LogLevel, Request, Roots, Sample, ToolContext
from openenv_core.tools.declare import completion, prompt, resource, tool
from openenv_core.tools.declared import DeclaredTools
from openenv_core.tools.environment import ToolEnvironment
from openenv_core.tools.errors import (
    AskingUnavailable,
    InvalidArguments,
    NoSuchPrompt,
    NoSuchResource,
    NoSuchTool,
    ToolFailed,
    ToolUnavailable,
)
from openenv_core.tools.host import ToolHost, is_tool_host
from openenv_core.tools.results import Completion, PromptResult, ResourceContents, ToolResult
from openenv_core.tools.specs import PromptArgument, PromptSpec, ResourceSpec, ResourceTemplateSpec, ToolSpec
from openenv_core.tools.toolset import Toolset
from openenv_core.tools.wire import (
    RESERVED_TOOL_NAMES,
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolAction,
    ToolError,
    ToolErrorType,
    ToolObservation,
)

__all__ = [
    "RESERVED_TOOL_NAMES",
    "SILENT",
    "AskingUnavailable",
    "Audio",
    "CallToolAction",
    "CallToolObservation",
    "Completion",
    "Content",
    "ContentBlock",
    "DeclaredTools",
    "Elicit",
    "Embedded",
    "Image",
    "InvalidArguments",
    "Link",
    "ListToolsAction",
    "ListToolsObservation",
    "LogLevel",
    "Message",
    "NoSuchPrompt",
    "NoSuchResource",
    "NoSuchTool",
    "PromptArgument",
    "PromptResult",
    "PromptSpec",
    "Request",
    "ResourceContents",
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
    "ToolFailed",
    "ToolHost",
    "ToolObservation",
    "ToolResult",
    "ToolSpec",
    "ToolUnavailable",
    "Toolset",
    "completion",
    "is_tool_host",
    "prompt",
    "resource",
    "tool",
]
