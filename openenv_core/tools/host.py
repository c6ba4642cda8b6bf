"""What a server asks of an environment that has tools."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from openenv_core.tools.context import ToolContext
from openenv_core.tools.results import Completion, PromptResult, ResourceContents, ToolResult
from openenv_core.tools.specs import PromptSpec, ResourceSpec, ResourceTemplateSpec, ToolSpec

T = TypeVar("T")
Now: TypeAlias = T | Awaitable[T]
"""The value, or what is awaited for it: methods may be `def` or `async def`."""


class ToolHost(Protocol):
    """An environment with tools, and maybe resources and prompts.

    `ToolEnvironment` is one whose class declares them. Any other environment may have these methods of its own.
    """

    def list_tools(self) -> Now[Sequence[ToolSpec]]:
        """Return the tools that there are."""

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[ToolResult]:
        """Call a tool. What the tool does wrong is in the result.

        Raises:
            EpisodeOver: The episode has ended.
        """

    def list_resources(self) -> Now[Sequence[ResourceSpec]]:
        """Return what there is to read."""

    def list_resource_templates(self) -> Now[Sequence[ResourceTemplateSpec]]:
        """Return the forms of addresses that can be read."""

    def read_resource(self, uri: str, context: ToolContext) -> Now[ResourceContents]:
        """Read a resource.

        Raises:
            NoSuchResource: There is none at that address.
        """

    def list_prompts(self) -> Now[Sequence[PromptSpec]]:
        """Return the prompts that there are."""

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt.

        Raises:
            NoSuchPrompt: There is none of that name.
            InvalidArguments: The arguments are not those that it takes.
        """

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[Completion]:
        """Return what an argument that somebody is typing could become.

        Args:
            ref: In MCP's own JSON: `{"type": "ref/prompt", "name": ...}` or `{"type": "ref/resource", "uri": ...}`.
            argument: `{"name": ..., "value": ...}`.
            context: The call's.
        """


def is_tool_host(environment: object) -> bool:
    """Whether an environment, or a class of them, has tools to list and to call."""
    return callable(getattr(environment, "list_tools", None)) and callable(
        getattr(environment, "call_tool", None)
    )
