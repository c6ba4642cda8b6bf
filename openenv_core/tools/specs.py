"""What is told of a tool, a resource or a prompt before it is used."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from openenv_core.tools.wire import Tool


class _Spec(BaseModel):
    """Named as Python names things; MCP's own JSON is an alias away."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    meta: dict[str, Any] | None = Field(default=None, alias="_meta")

    def to_mcp(self) -> dict[str, Any]:
        """Return MCP's own JSON of it."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ToolSpec(_Spec):
    """One tool.

    Attributes:
        name: Unique among the tools of an environment.
        input_schema: JSON schema of the arguments, of type object.
        title: A name to show to people.
        output_schema: JSON schema of the structured result, of type object; None where nothing is promised.
        annotations: Hints of MCP's: readOnlyHint, destructiveHint, idempotentHint, openWorldHint.
        meta: Whatever else, for those who know it.
    """

    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    title: str | None = None
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None

    def wire(self) -> Tool:
        """Return what a step lists of it."""
        return Tool(name=self.name, description=self.description, input_schema=self.input_schema)


class ResourceSpec(_Spec):
    """Something to read, at an address.

    Attributes:
        uri: The address.
        mime_type: Of the content.
    """

    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None


class ResourceTemplateSpec(_Spec):
    """Things to read, at addresses of one form.

    Attributes:
        uri_template: The form, as in RFC 6570: `notes://{name}`, or `files://{+path}` for a value with slashes.
    """

    uri_template: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None


class PromptArgument(_Spec):
    """One argument of a prompt."""

    name: str
    description: str | None = None
    required: bool = False


class PromptSpec(_Spec):
    """Messages to begin a conversation with."""

    name: str
    title: str | None = None
    description: str | None = None
    arguments: tuple[PromptArgument, ...] = ()
