"""What a server object has beside tools, for the server's /mcp."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_core.compat.mcp_link import Link
from openenv_core.compat.mcp_results import mcp_json, specs
from openenv_core.tools import (
    Completion,
    InvalidArguments,
    NoSuchPrompt,
    NoSuchResource,
    PromptResult,
    PromptSpec,
    ResourceContents,
    ResourceSpec,
    ResourceTemplateSpec,
    ToolContext,
)


class McpHost:
    """Resources, prompts and completions, as the server object has them."""

    _link: Link

    async def list_resources(self) -> Sequence[ResourceSpec]:
        """Return what there is to read."""
        return specs(ResourceSpec, await self._link.arun(lambda client: client.list_resources()), "resources")

    async def list_resource_templates(self) -> Sequence[ResourceTemplateSpec]:
        """Return the forms of addresses that can be read."""
        found = await self._link.arun(lambda client: client.list_resource_templates())
        return specs(ResourceTemplateSpec, found, "resource_templates")

    async def read_resource(self, uri: str, context: ToolContext) -> ResourceContents:
        """Read a resource.

        Raises:
            NoSuchResource: There is none at that address, or it cannot be read.
        """
        try:
            found = await self._link.arun(lambda client: client.read_resource(uri))
        except Exception as error:
            raise NoSuchResource(f"expected the address of a resource, got {uri[:200]!r}: {error}") from error
        return [mcp_json(part) for part in getattr(found, "contents", found)]

    async def list_prompts(self) -> Sequence[PromptSpec]:
        """Return the prompts that there are."""
        return specs(PromptSpec, await self._link.arun(lambda client: client.list_prompts()), "prompts")

    async def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> PromptResult:
        """Return the messages of a prompt.

        Raises:
            NoSuchPrompt: There is none of that name.
            InvalidArguments: It could not be made of these arguments.
        """
        try:
            found = await self._link.arun(lambda client: client.get_prompt(name, dict(arguments)))
        except Exception as error:
            there_are = [prompt.name for prompt in await self.list_prompts()]
            if name not in there_are:
                known = ", ".join(there_are) or "none"
                raise NoSuchPrompt(f"expected one of the prompts {known}, got {name[:200]!r}") from error
            raise InvalidArguments(f"expected arguments of the prompt {name!r}, got: {error}") from error
        return PromptResult(
            messages=[mcp_json(message) for message in found.messages], description=found.description
        )

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Completion:
        """Return what an argument could become: nothing, for server objects rarely know."""
        return Completion(values=[])
