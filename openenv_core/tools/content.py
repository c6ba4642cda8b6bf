"""What a tool or a prompt may return beside plain values: pictures, sound, documents."""

import base64
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ContentBlock: TypeAlias = dict[str, Any]
"""One block of content in MCP's own JSON, with a key `type`."""


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    text: str

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "text", "text": self.text}


@dataclass(frozen=True, slots=True)
class Image:
    """A picture."""

    data: bytes
    mime_type: str = "image/png"

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "image", "data": _base64(self.data), "mimeType": self.mime_type}


@dataclass(frozen=True, slots=True)
class Audio:
    """A sound."""

    data: bytes
    mime_type: str = "audio/wav"

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "audio", "data": _base64(self.data), "mimeType": self.mime_type}


@dataclass(frozen=True, slots=True)
class Embedded:
    """A document, whole.

    Attributes:
        content: Text, or bytes that are none.
    """

    uri: str
    content: str | bytes
    mime_type: str | None = None

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        return {"type": "resource", "resource": contents(self.uri, self.content, self.mime_type)}


@dataclass(frozen=True, slots=True)
class Link:
    """Where a document is to be had."""

    uri: str
    name: str
    description: str | None = None
    mime_type: str | None = None

    def block(self) -> ContentBlock:
        """Return MCP's own JSON of it."""
        told = {"description": self.description, "mimeType": self.mime_type}
        found = {key: value for key, value in told.items() if value is not None}
        return {"type": "resource_link", "uri": self.uri, "name": self.name, **found}


Content: TypeAlias = Text | Image | Audio | Embedded | Link


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt."""

    content: str | Content
    role: Literal["user", "assistant"] = "user"

    def to_mcp(self) -> dict[str, Any]:
        """Return MCP's own JSON of it."""
        content = Text(self.content) if isinstance(self.content, str) else self.content
        return {"role": self.role, "content": content.block()}


def contents(uri: str, content: str | bytes, mime_type: str | None) -> dict[str, Any]:
    """Return MCP's own JSON of what a resource holds."""
    told: dict[str, Any] = {"uri": uri}
    if mime_type is not None:
        told["mimeType"] = mime_type
    if isinstance(content, str):
        return {**told, "text": content}
    return {**told, "blob": _base64(content)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
