"""What an author's methods have returned or raised, as what callers are told; or an error that says what is wrong."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from openenv_core.protocol.faults import text_of
from openenv_core.tools.content import Audio, Embedded, Image, Link, Message, Text, contents
from openenv_core.tools.errors import ToolFailed, ToolUnavailable
from openenv_core.tools.results import Completion, ToolResult
from openenv_core.tools.wire import ToolErrorType

MAX_COMPLETIONS: Final = 100
"""What MCP allows in one answer."""


def failure(error: BaseException) -> ToolResult:
    """Return the result of a tool that has raised."""
    if (unavailable := _unavailable(error)) is not None:
        text = text_of(unavailable)
        return ToolResult.failed(ToolErrorType.TRANSPORT_ERROR, text, infrastructure_error=text)
    text = text_of(error) if isinstance(error, ToolFailed) else f"{type(error).__name__}: {text_of(error)}"
    return ToolResult.failed(ToolErrorType.EXECUTION_ERROR, text)


def _unavailable(error: BaseException) -> ToolUnavailable | None:
    """Return what failed beside the caller, also where it came out of a group of tasks."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_unavailable, error.exceptions)), None)
    return error if isinstance(error, ToolUnavailable) else None


async def apart(call: Callable[[], Any]) -> Any:
    """Call a function, and await what it returns, in a task of its own: what a tool does to it ends the tool alone.

    Raises:
        ToolFailed: It was cancelled, and not by whoever waits here.
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
        raise ToolFailed(why) from None
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
        message = part if isinstance(part, Message) else Message(part)
        if not isinstance(message.content, str | Text | Image | Audio | Embedded | Link):
            raise TypeError(
                f"expected text, content or messages from {method}, got {type(message.content).__name__}"
            )
        found.append(message.to_mcp())
    return found


def completed(values: object, method: str) -> Completion:
    """Return what an argument could become.

    Raises:
        TypeError: It is no list of texts.
    """
    found = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if found is None or not all(isinstance(value, str) for value in found):
        raise TypeError(f"expected a list of texts from {method}, got {values!r:.200}")
    return Completion(values=found[:MAX_COMPLETIONS], total=len(found), has_more=len(found) > MAX_COMPLETIONS)
