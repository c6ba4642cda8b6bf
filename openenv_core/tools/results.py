"""What became of a call, in the two forms that it is told in: for a step, and for MCP."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic_core import PydanticSerializationError

from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tools.content import Audio, ContentBlock, Embedded, Image, Link, Text
from openenv_core.tools.wire import CallToolObservation, ToolError, ToolErrorType

ResourceContents: TypeAlias = list[dict[str, Any]]
"""What a resource holds, in MCP's own JSON: uri, mimeType, and text or blob."""

_CONTENT = (Text, Image, Audio, Embedded, Link)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """What a call came to.

    Attributes:
        content: For a reader: blocks in MCP's own JSON.
        value: For a program: the tool's own value as plain JSON; None where the call failed.
        structured: The same as an object, where the value is data and not content.
        error: Why the call failed.
        reward: What this call earned.
        done: It has ended the episode.
        metadata: For the observation of the step.
    """

    content: list[ContentBlock]
    value: Any = None
    structured: dict[str, Any] | None = None
    error: ToolError | None = None
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, *, wrapped: bool | None = None) -> "ToolResult":
        """Return the result of a tool that returned a value.

        Args:
            value: A `ToolResult` is returned as it is. Content, or a list with content in it, becomes blocks.
                Anything else is data: text as itself, the rest as JSON, and as an object in `structured`.
            wrapped: Whether that object is `{"result": value}`; None: unless the value is an object itself.

        Raises:
            TypeError: JSON cannot hold it, or it is no object where that is promised.
        """
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, _CONTENT):
            return cls._of_content([value])
        if isinstance(value, list | tuple) and any(isinstance(part, _CONTENT) for part in value):
            return cls._of_content(value)
        plain: Any = value if value is None or type(value) in (int, bool) else _plain(value)
        if wrapped is None:
            wrapped = not isinstance(plain, dict)
        if not wrapped and not isinstance(plain, dict):
            raise TypeError(f"expected an object, as the tool's return type promises, got {plain!r:.200}")
        structured = {"result": plain} if wrapped else plain
        return cls(content=_blocks(plain), value=plain, structured=structured)

    @classmethod
    def failed(cls, error_type: ToolErrorType, message: str, **metadata: Any) -> "ToolResult":
        """Return the result of a call that failed."""
        return cls(
            content=[Text(message).block()],
            error=ToolError(error_type=error_type, message=message),
            metadata=metadata,
        )

    @classmethod
    def _of_content(cls, parts: Sequence[object]) -> "ToolResult":
        content = [
            block
            for part in parts
            for block in ([part.block()] if isinstance(part, _CONTENT) else _blocks(_plain(part)))
        ]
        _encoded(content)
        texts = [block["text"] for block in content if block["type"] == "text"]
        return cls(content=content, value="\n".join(texts) if len(texts) == len(content) else content)

    @property
    def is_error(self) -> bool:
        """Whether the call failed."""
        return self.error is not None

    def observation(self, tool_name: str) -> CallToolObservation:
        """Return what a step answers."""
        return CallToolObservation(
            tool_name=tool_name,
            result=self.value,
            error=self.error,
            reward=self.reward,
            done=self.done,
            metadata=self.metadata,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """The messages of a prompt.

    Attributes:
        messages: In MCP's own JSON: role and content.
    """

    messages: list[dict[str, Any]]
    description: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an argument that somebody is typing could become.

    Attributes:
        values: The best first, at most 100.
        total: How many there are.
        has_more: There are more than `values` holds.
    """

    values: list[str]
    total: int | None = None
    has_more: bool = False


def _blocks(plain: Any) -> list[ContentBlock]:
    if plain is None:
        return []
    return [Text(plain if isinstance(plain, str) else dumps(plain).decode()).block()]


def _plain(value: object) -> Any:
    if type(value) is str and value.isascii():
        return value
    return from_json(_encoded(value))


def _encoded(value: object) -> bytes:
    try:
        return dumps(value)
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from error
