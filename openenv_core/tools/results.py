"""The results of tools and prompts, and their two encodings: for a step, and for MCP."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from pydantic_core import PydanticSerializationError

from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tools.wire import CallToolObservation, ToolError, ToolErrorType

ContentBlock: TypeAlias = dict[str, Any]
"""A content block as MCP's JSON, with a key `type`."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text content."""

    text: str

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "text", "text": self.text}


@dataclass(frozen=True, slots=True)
class Image:
    """An image."""

    data: bytes
    mime_type: str = "image/png"

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "image", "data": _base64(self.data), "mimeType": self.mime_type}


@dataclass(frozen=True, slots=True)
class Audio:
    """Audio content."""

    data: bytes
    mime_type: str = "audio/wav"

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "audio", "data": _base64(self.data), "mimeType": self.mime_type}


@dataclass(frozen=True, slots=True)
class Embedded:
    """An embedded document.

    Attributes:
        content: The document as text, or as bytes if it is binary.
    """

    uri: str
    content: str | bytes
    mime_type: str | None = None

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "resource", "resource": contents(self.uri, self.content, self.mime_type)}


@dataclass(frozen=True, slots=True)
class ResourceLink:
    """A link to a document."""

    uri: str
    name: str
    description: str | None = None
    mime_type: str | None = None

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        fields = {"description": self.description, "mimeType": self.mime_type}
        present = {key: value for key, value in fields.items() if value is not None}
        return {"type": "resource_link", "uri": self.uri, "name": self.name, **present}


Content: TypeAlias = Text | Image | Audio | Embedded | ResourceLink
"""Content that a result may hold besides plain values."""

_CONTENT: Final = get_args(Content)

ResourceContents: TypeAlias = list[dict[str, Any]]
"""The contents of a resource as MCP's JSON: uri, mimeType, and text or blob."""


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One message of a prompt."""

    content: str | Content
    role: Literal["user", "assistant"] = "user"

    def to_mcp(self) -> dict[str, Any]:
        """Return MCP's own JSON of it."""
        content = Text(self.content) if isinstance(self.content, str) else self.content
        return {"role": self.role, "content": content.block()}


def contents(uri: str, content: str | bytes, mime_type: str | None) -> dict[str, Any]:
    """Return the content of a resource as MCP's JSON."""
    fields = {"uri": uri} if mime_type is None else {"uri": uri, "mimeType": mime_type}
    if isinstance(content, str):
        return {**fields, "text": content}
    return {**fields, "blob": _base64(content)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        content: Content blocks as MCP's JSON, for readers.
        value: The tool's value as plain JSON, for programs; None if the call failed.
        structured: The value as an object, if it is data, not content.
        error: Why the call failed; None if it succeeded.
        reward: Reward of this call.
        done: Whether the call ended the episode.
        truncated: Whether a limit of calls or time ended it; only with `done`.
        metadata: Metadata of the step's observation.
    """

    content: list[ContentBlock]
    value: Any = None
    structured: dict[str, Any] | None = None
    error: ToolError | None = None
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, *, wrapped: bool | None = None) -> "ToolResult":
        """Return the result of a tool that returned a value.

        Args:
            value: A `ToolResult` is returned unchanged. Content, or a list that contains some, becomes blocks.
                Anything else is data: its block is the text itself or JSON, and `structured` an object.
            wrapped: Whether `structured` is `{"result": value}`; None wraps all values but objects.

        Raises:
            TypeError: JSON cannot hold the value, or it is not an object although `wrapped` is False.
        """
        if isinstance(value, ToolResult):
            return value
        if isinstance(value, _CONTENT):
            return cls._of_content([value])
        if isinstance(value, list | tuple) and any(isinstance(item, _CONTENT) for item in value):
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
            for item in parts
            for block in ([item.block()] if isinstance(item, _CONTENT) else _blocks(_plain(item)))
        ]
        _encode(content)
        texts = [block["text"] for block in content if block["type"] == "text"]
        return cls(content=content, value="\n".join(texts) if len(texts) == len(content) else content)

    @property
    def is_error(self) -> bool:
        """Whether the call failed."""
        return self.error is not None

    def observation(self, tool_name: str) -> CallToolObservation:
        """Return the observation of the step that made the call."""
        return CallToolObservation(
            tool_name=tool_name,
            result=self.value,
            error=self.error,
            reward=self.reward,
            done=self.done,
            truncated=self.truncated,
            metadata=self.metadata,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """The messages of a prompt.

    Attributes:
        messages: The messages as MCP's JSON: role and content.
    """

    messages: list[dict[str, Any]]
    description: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentCompletion:
    """Completions of an argument that is being typed.

    Attributes:
        values: At most 100 completions, best first.
        total: Total number of completions.
        has_more: Whether there are more than in `values`.
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
    return from_json(_encode(value))


def _encode(value: object) -> bytes:
    try:
        return dumps(value)
    except PydanticSerializationError as error:
        raise TypeError(str(error)) from error
