"""Between what clients of MCP return, whichever package's they are, and what environments here say."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict

from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tools import CallToolObservation, ToolContext, ToolErrorType, ToolResult
from openenv_core.types import Observation

SpecT = TypeVar("SpecT", bound=BaseModel)

_INVALID: Final = re.compile(
    r"(Error executing tool \S+: )?\d+ validation errors? for (call\[|\w+Arguments\b)|Input validation error"
)
"""How FastMCP and the SDK begin to say that arguments do not fit; they have no code for it."""


class CallToolResult(BaseModel):
    """What a tool gave, with the attributes and the JSON that the released package has for it.

    Attributes:
        content: Blocks, as the server object's package has them.
        structured_content: The same as an object.
        meta: What the server says beside.
        data: The value itself.
        is_error: Never: a call that failed is an observation with an error.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    content: list[Any]
    structured_content: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    data: Any = None
    is_error: bool = False


async def ask_tool(
    client: Any, name: str, arguments: Mapping[str, Any], context: ToolContext
) -> CallToolResult:
    """Call a tool by a client of FastMCP's or of the SDK's; what fails is a result too."""

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        context.progress(progress, total, message)

    if hasattr(client, "call_tool_mcp"):  # FastMCP's, whose own result has the value beside the content
        found = await client.call_tool(name, arguments, raise_on_error=False, progress_handler=progress)
    else:
        found = await client.call_tool(name, arguments, progress_callback=progress)
    return _result(found)


def plain_result(value: Any) -> CallToolResult:
    """Return the result of a function that no server object knows."""
    text = {"type": "text", "text": str(value)}
    return CallToolResult(content=[text], structured_content={"result": value}, data=value)


def _result(found: Any) -> CallToolResult:
    structured = getattr(found, "structured_content", None)
    data = getattr(found, "data", None)
    if data is None and isinstance(structured, dict):
        data = structured["result"] if set(structured) == {"result"} else structured
    return CallToolResult(
        content=list(found.content),
        structured_content=structured,
        meta=getattr(found, "meta", None),
        data=data,
        is_error=bool(getattr(found, "is_error", False)),
    )


def error_text(result: CallToolResult) -> str:
    """Return why a call failed, in the tool's words."""
    texts = [block.text for block in result.content if getattr(block, "type", None) == "text"]
    return "\n".join(texts) or "the tool gave no reason"


def error_type(name: str, text: str, there_are: Iterable[str]) -> ToolErrorType:
    """Return how a call failed."""
    if name not in set(there_are):
        return ToolErrorType.TOOL_NOT_FOUND
    return ToolErrorType.INVALID_ARGS if _INVALID.match(text) else ToolErrorType.EXECUTION_ERROR


def tool_result(observation: Observation) -> ToolResult:
    """Return what a step of the author's came to, for MCP. It need not be a tool's observation any more."""
    worth: dict[str, Any] = {
        "reward": None if observation.reward is None else float(observation.reward),
        "done": observation.done,
        "metadata": observation.metadata,
    }
    if not isinstance(observation, CallToolObservation):
        said = observation.model_dump(exclude={"reward", "done", "metadata"}) or observation.metadata
        plain = ToolResult.of(said)
        return ToolResult(content=plain.content, value=plain.value, structured=plain.structured, **worth)
    if observation.error is not None:
        failed = ToolResult.failed(observation.error.error_type, observation.error.message)
        return ToolResult(content=failed.content, error=observation.error, **worth)
    result = observation.result
    if not isinstance(result, CallToolResult):
        plain = ToolResult.of(result)
        return ToolResult(content=plain.content, value=plain.value, structured=plain.structured, **worth)
    content = [mcp_json(block) for block in result.content]
    value = from_json(dumps(result.data))
    return ToolResult(content=content, value=value, structured=result.structured_content, **worth)


def mcp_json(model: Any) -> dict[str, Any]:
    """Return MCP's own JSON of a model of whichever package."""
    if isinstance(model, Mapping):
        return dict(model)
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def specs(kind: type[SpecT], found: Any, within: str) -> list[SpecT]:
    """Return what a client's listing holds; the SDK's has it in an attribute, FastMCP's is a list."""
    known = {field.alias for field in kind.model_fields.values()}
    return [
        kind.model_validate({key: value for key, value in mcp_json(one).items() if key in known})
        for one in getattr(found, within, found)
    ]
