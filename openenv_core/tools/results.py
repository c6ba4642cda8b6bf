"""What a tool or a prompt returns or raises, and the two forms in which that is told: for a step, and for MCP."""

import asyncio
import base64
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from pydantic_core import PydanticSerializationError

from openenv_core.protocol.errors import text_of
from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tools.wire import (
    CallToolObservation,
    ToolError,
    ToolErrorType,
    ToolFailedError,
    ToolUnavailableError,
)

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
class ResourceLink:
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


Content: TypeAlias = Text | Image | Audio | Embedded | ResourceLink


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
    """Return MCP's own JSON of what a resource holds."""
    told: dict[str, Any] = {"uri": uri}
    if mime_type is not None:
        told["mimeType"] = mime_type
    if isinstance(content, str):
        return {**told, "text": content}
    return {**told, "blob": _base64(content)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


ResourceContents: TypeAlias = list[dict[str, Any]]
"""What a resource holds, in MCP's own JSON: uri, mimeType, and text or blob."""

_CONTENT = (Text, Image, Audio, Embedded, ResourceLink)


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
class ArgumentCompletion:
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


MAX_COMPLETIONS: Final = 100
"""What MCP allows in one answer."""


def failure(error: BaseException) -> ToolResult:
    """Return the result of a tool that has raised."""
    if (unavailable := _unavailable(error)) is not None:
        text = text_of(unavailable)
        return ToolResult.failed(ToolErrorType.TRANSPORT_ERROR, text, infrastructure_error=text)
    text = (
        text_of(error) if isinstance(error, ToolFailedError) else f"{type(error).__name__}: {text_of(error)}"
    )
    return ToolResult.failed(ToolErrorType.EXECUTION_ERROR, text)


def _unavailable(error: BaseException) -> ToolUnavailableError | None:
    """Return what failed beside the caller, also where it came out of a group of tasks."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_unavailable, error.exceptions)), None)
    return error if isinstance(error, ToolUnavailableError) else None


async def apart(call: Callable[[], Any]) -> Any:
    """Call a function, and await what it returns, in a task of its own: what a tool does to it ends the tool alone.

    Raises:
        ToolFailedError: It was cancelled, and not by whoever waits here.
        BaseException: Whatever it raised.
    """

    async def run() -> tuple[Any, BaseException | None]:
        try:
            value = call()
            return (await value if inspect.isawaitable(value) else value), None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # an exit that leaves a task ends the event loop
            return None, error

    before = cancellations_of_task()
    task = asyncio.create_task(run())
    try:
        value, error = await task
    except asyncio.CancelledError:
        if cancellations_of_task() > before:
            raise
        why = (
            "expected a result, got a cancellation; the tool cancelled itself, or awaited what was cancelled"
        )
        raise ToolFailedError(why) from None
    finally:
        task.cancel()
    if error is not None:
        raise error
    return value


def cancellations_of_task() -> int:
    """Return how often the task at hand was asked to end, and has not said that it goes on."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def now(value: object, method: str) -> object:
    """Return a value that a method declared as a plain one has returned.

    Raises:
        TypeError: It is yet to be awaited.
    """
    if not inspect.isawaitable(value):
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise TypeError(
        f"expected a value from {method}, got {type(value).__name__}; write it as `async def`, or give it the return "
        "type Awaitable[...]"
    )


def checked_result(hook: str, result: object) -> ToolResult:
    """Return what a hook has returned.

    Raises:
        TypeError: It is no result.
    """
    if not isinstance(result, ToolResult):
        raise TypeError(
            f"expected a ToolResult from {hook}, got {type(result).__name__}; return the result, or what replace() of "
            "dataclasses makes of it"
        )
    return result


def resource_contents(uri: str, held: object, mime_type: str | None) -> dict[str, Any]:
    """Return what is at an address, in MCP's own JSON.

    Raises:
        TypeError: JSON cannot hold it.
    """
    if isinstance(held, bytes):
        return contents(uri, held, mime_type or "application/octet-stream")
    if isinstance(held, str):
        return contents(uri, held, mime_type or "text/plain")
    result = ToolResult.of(held)
    return contents(
        uri, result.content[0]["text"] if result.content else "null", mime_type or "application/json"
    )


def messages(said: object, method: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt, in MCP's own JSON.

    Raises:
        TypeError: They are none.
    """
    parts: Sequence[Any] = said if isinstance(said, list | tuple) else [said]
    found = []
    for part in parts:
        message = part if isinstance(part, PromptMessage) else PromptMessage(part)
        if not isinstance(message.content, str | Text | Image | Audio | Embedded | ResourceLink):
            raise TypeError(
                f"expected text, content or messages from {method}, got {type(message.content).__name__}"
            )
        found.append(message.to_mcp())
    return found


def completed(values: object, method: str) -> ArgumentCompletion:
    """Return what an argument could become.

    Raises:
        TypeError: It is no list of texts.
    """
    found = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if found is None or not all(isinstance(value, str) for value in found):
        raise TypeError(f"expected a list of texts from {method}, got {values!r:.200}")
    return ArgumentCompletion(
        values=found[:MAX_COMPLETIONS], total=len(found), has_more=len(found) > MAX_COMPLETIONS
    )
