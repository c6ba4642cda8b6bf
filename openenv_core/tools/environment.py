"""Environments whose actions are tool calls, and the interface of all environments with tools."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar, overload

from openenv_core.environment import Environment
from openenv_core.errors import ConfigurationError, EpisodeOverError
from openenv_core.pending import Pending, convert, require_value
from openenv_core.protocol.errors import text_of
from openenv_core.tools.context import SILENT, ToolContext
from openenv_core.tools.declare import declared_as
from openenv_core.tools.results import (
    ArgumentCompletion,
    Content,
    PromptMessage,
    PromptResult,
    ResourceContents,
    ToolResult,
    contents,
)
from openenv_core.tools.specs import PromptSpec, ResourceSpec, ResourceTemplateSpec, ToolSpec
from openenv_core.tools.toolset import DeclaredMethod, Toolset
from openenv_core.tools.wire import (
    CallToolAction,
    CallToolObservation,
    InvalidArgumentsError,
    ListToolsAction,
    ListToolsObservation,
    NoSuchPromptError,
    NoSuchResourceError,
    ToolAction,
    ToolErrorType,
    ToolFailedError,
    ToolObservation,
    ToolUnavailableError,
)
from openenv_core.types import StateT

_ASYNC_ADVICE: Final = "write it as `async def`, or give it the return type Awaitable[...]"

T = TypeVar("T")
Now: TypeAlias = T | Awaitable[T]
"""A value or an awaitable of it: methods may be `def` or `async def`."""


class ToolHost(Protocol):
    """The interface of an environment with tools, and optionally resources and prompts.

    `ToolEnvironment` implements it from declarations in the class. Other environments may implement it themselves.
    """

    def list_tools(self) -> Now[Sequence[ToolSpec]]:
        """Return all tools."""

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[ToolResult]:
        """Call a tool. A failure of the tool is part of the result.

        Raises:
            EpisodeOverError: The episode has ended.
        """

    def list_resources(self) -> Now[Sequence[ResourceSpec]]:
        """Return all resources."""

    def list_resource_templates(self) -> Now[Sequence[ResourceTemplateSpec]]:
        """Return all resource templates."""

    def read_resource(self, uri: str, context: ToolContext) -> Now[ResourceContents]:
        """Read a resource.

        Raises:
            NoSuchResourceError: There is no resource at that URI.
        """

    def list_prompts(self) -> Now[Sequence[PromptSpec]]:
        """Return all prompts."""

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt.

        Raises:
            NoSuchPromptError: There is no prompt of that name.
            InvalidArgumentsError: The arguments are invalid.
        """

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[ArgumentCompletion]:
        """Return completions of an argument that is being typed.

        Args:
            ref: MCP's JSON: `{"type": "ref/prompt", "name": ...}` or `{"type": "ref/resource", "uri": ...}`.
            argument: `{"name": ..., "value": ...}`.
            context: Context of the call.
        """


def is_tool_host(environment: object) -> bool:
    """Whether an environment, or its class, has the methods `list_tools` and `call_tool`."""
    return callable(getattr(environment, "list_tools", None)) and callable(
        getattr(environment, "call_tool", None)
    )


class DeclaredTools:
    """A mixin that implements `ToolHost` from declarations, for environments that also have actions of their own.

    Calls by `step` and over MCP are equivalent: both go through `call_tool` and count as a step of the episode. An
    exception of a tool becomes the error of the call, and the session remains open; `EpisodeOverError` is passed on.

    Attributes:
        TOOLSET: The declarations of the class.
    """

    TOOLSET: ClassVar[Toolset] = Toolset()

    def __init_subclass__(cls, **options: Any) -> None:
        """Read the declarations of the class.

        Raises:
            ConfigurationError: A declaration is invalid.
        """
        super().__init_subclass__(**options)
        cls.TOOLSET = Toolset.of(cls)
        _check_methods(cls)

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Hook before each call, including those of unknown tools; a returned result replaces the call.

        Args:
            name: Name of the tool.
            arguments: The caller's arguments, not validated yet.

        Raises:
            EpisodeOverError: No episode is running.
        """
        return None

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Hook after each call, including failed ones; returns the result with `reward` and `done` set."""
        return result

    def tool_step(self, action: ToolAction) -> Now[ToolObservation]:
        """List the tools or call one, as a step. Raises `EpisodeOverError` if no episode is running."""
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[spec.wire() for spec in self.list_tools()])
        result = self.call_tool(action.tool_name, action.arguments, SILENT)
        if isinstance(result, ToolResult):
            return result.observation(action.tool_name)
        return Pending(result, lambda done: done.observation(action.tool_name))

    def list_tools(self) -> Sequence[ToolSpec]:
        """Return the tools that the class declares."""
        return [tool.spec for tool in self.TOOLSET.tools.values()]

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[ToolResult]:
        """Call a tool; see `ToolHost.call_tool`."""
        if (result := self.before_call(name, arguments)) is not None:
            return _checked_result("before_call", result)
        if (tool := self.TOOLSET.tools.get(name)) is None:
            known_names = ", ".join(self.TOOLSET.tools) or "none"
            message = f"expected one of the tools {known_names}, got {name[:200]!r}"
            return self._after(name, arguments, ToolResult.failed(ToolErrorType.TOOL_NOT_FOUND, message))
        try:
            call_arguments = tool.method.read(arguments, context)
            method: Callable[..., Any] = getattr(self, tool.method.attribute)
            if tool.method.asynchronous:
                return self._call_async(tool, arguments, lambda: method(**call_arguments))
            value = require_value(method(**call_arguments), tool.method.attribute, _ASYNC_ADVICE)
            result = ToolResult.of(value, wrapped=tool.wrapped)
        except (EpisodeOverError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, or a panic of a compiled library
            result = to_failure(error)
        return self._after(name, arguments, result)

    def list_resources(self) -> Sequence[ResourceSpec]:
        """Return the resources that the class declares."""
        return [resource.spec for resource in self.TOOLSET.resources.values()]

    def list_resource_templates(self) -> Sequence[ResourceTemplateSpec]:
        """Return the resource templates that the class declares."""
        return [template.spec for template in self.TOOLSET.templates.values()]

    def read_resource(self, uri: str, context: ToolContext) -> Now[ResourceContents]:
        """Read a resource; see `ToolHost.read_resource`."""
        known: Mapping[str, DeclaredMethod[Any]] = {**self.TOOLSET.resources, **self.TOOLSET.templates}
        for resource in known.values():
            if (values := resource.form.match(uri)) is not None:
                return self._read(resource, uri, values, context)
        raise NoSuchResourceError(f"expected the address of a resource, there is none at {uri[:200]!r}")

    def list_prompts(self) -> Sequence[PromptSpec]:
        """Return the prompts that the class declares."""
        return [prompt.spec for prompt in self.TOOLSET.prompts.values()]

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt; see `ToolHost.get_prompt`."""
        if (prompt := self.TOOLSET.prompts.get(name)) is None:
            known_names = ", ".join(self.TOOLSET.prompts) or "none"
            raise NoSuchPromptError(f"expected one of the prompts {known_names}, got {name[:200]!r}")
        call_arguments = prompt.method.read(arguments, context, strict=False)
        description = prompt.spec.description
        return convert(
            getattr(self, prompt.method.attribute)(**call_arguments),
            lambda value: PromptResult(
                messages=_messages(value, prompt.method.attribute), description=description
            ),
        )

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[ArgumentCompletion]:
        """Return completions of an argument; none if the class declares no completion for it."""
        kind = str(ref.get("type"))
        reference = (kind, str(ref.get("name" if kind == "ref/prompt" else "uri")))
        method = self.TOOLSET.completions.get((reference, str(argument.get("name"))))
        if method is None:
            return ArgumentCompletion(values=[])
        return convert(
            getattr(self, method)(str(argument.get("value", ""))),
            lambda values: _check_completion(values, method),
        )

    def _read(
        self, resource: DeclaredMethod[Any], uri: str, values: Mapping[str, str], context: ToolContext
    ) -> Now[ResourceContents]:
        try:
            call_arguments = resource.method.read(values, context, strict=False)
        except InvalidArgumentsError as error:
            form = resource.form.template
            raise NoSuchResourceError(
                f"expected an address like {form}, got {uri[:200]!r}; {error}"
            ) from None
        return convert(
            getattr(self, resource.method.attribute)(**call_arguments),
            lambda value: [_resource_contents(uri, value, resource.spec.mime_type)],
        )

    async def _call_async(
        self, tool: DeclaredMethod[ToolSpec], arguments: Mapping[str, Any], call: Callable[[], Any]
    ) -> ToolResult:
        deadline = asyncio.timeout(tool.timeout_s)
        try:
            async with deadline:
                value = await _run_in_task(call)
            result = ToolResult.of(value, wrapped=tool.wrapped)
        except (EpisodeOverError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            if deadline.expired():
                message = f"expected an end within {tool.timeout_s:g} s, got none; the call was given up"
                result = ToolResult.failed(ToolErrorType.TIMEOUT, message)
            else:
                result = to_failure(error)
        return self._after(tool.spec.name, arguments, result)

    def _after(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        return _checked_result("after_call", self.after_call(name, arguments, result))


def _check_methods(cls: type) -> None:
    """Reject declared methods with reserved names, which servers call for another purpose, and asynchronous hooks."""
    reserved = {*dir(DeclaredTools), *dir(Environment)}
    for owner in cls.__mro__:
        for name in vars(owner).keys() & reserved:
            if declared_as(vars(owner)[name]):
                raise ConfigurationError(
                    f"expected a method with a name of its own, got {owner.__qualname__}.{name}, which servers call "
                    f"for another reason; call the method otherwise, and declare it as name={name!r}"
                )
    for name in ("before_call", "after_call"):
        if inspect.iscoroutinefunction(getattr(cls, name)):
            raise ConfigurationError(
                f"expected a plain {name}, got {cls.__qualname__}.{name}, which is asynchronous; what has to wait "
                "belongs in the tool"
            )


class ToolEnvironment(DeclaredTools, Environment[ToolAction, Any, StateT]):
    """An environment of tools. Authors implement `reset`, `state` and tools (`openenv_core.tools.declare`).

    An environment with other actions too uses `DeclaredTools` instead.
    """

    # An asynchronous tool's observation must be awaited. Any in place of Awaitable spares callers of synchronous tools
    # an assertion.
    @overload
    def step(self, action: CallToolAction) -> CallToolObservation | Any: ...

    @overload
    def step(self, action: ListToolsAction) -> ListToolsObservation | Any: ...

    @overload
    def step(self, action: ToolAction) -> ToolObservation | Any: ...

    def step(self, action: ToolAction) -> ToolObservation | Any:
        """List the tools or call one. Raises `EpisodeOverError` if no episode is running."""
        return self.tool_step(action)


CANCELLED: Final = (
    "the call was cancelled without a result; the tool cancelled itself, or awaited what was cancelled"
)

MAX_COMPLETIONS: Final = 100
"""MCP's limit for one response."""


def to_failure(error: BaseException) -> ToolResult:
    """Return the result for an exception of a tool."""
    if (unavailable := _find_unavailable(error)) is not None:
        text = text_of(unavailable)
        return ToolResult.failed(ToolErrorType.TRANSPORT_ERROR, text, infrastructure_error=text)
    if isinstance(error, InvalidArgumentsError):
        return ToolResult.failed(ToolErrorType.INVALID_ARGS, text_of(error))
    prefix = "" if isinstance(error, ToolFailedError) else f"{type(error).__name__}: "
    return ToolResult.failed(ToolErrorType.EXECUTION_ERROR, prefix + text_of(error))


def _find_unavailable(error: BaseException) -> ToolUnavailableError | None:
    """Return a ToolUnavailableError, also if it is in an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_find_unavailable, error.exceptions)), None)
    return error if isinstance(error, ToolUnavailableError) else None


async def _run_in_task(call: Callable[[], Any]) -> Any:
    """Call a function and await its value in a separate task, so that a tool that cancels its task ends only itself.

    Raises:
        ToolFailedError: The task was cancelled, but not by the caller.
    """

    async def run() -> tuple[Any, BaseException | None]:
        try:
            value = call()
            return (await value if inspect.isawaitable(value) else value), None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit that leaves a task stops the event loop
            return None, error

    cancellations = count_cancellations()
    task = asyncio.create_task(run())
    try:
        value, error = await task
    except asyncio.CancelledError:
        if count_cancellations() > cancellations:
            raise
        raise ToolFailedError(CANCELLED) from None
    finally:
        task.cancel()
    if error is not None:
        raise error
    return value


def count_cancellations() -> int:
    """Return the number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _checked_result(hook: str, result: object) -> ToolResult:
    """Return a hook's result. Raises TypeError if it is not a ToolResult."""
    if not isinstance(result, ToolResult):
        raise TypeError(
            f"expected a ToolResult from {hook}, got {type(result).__name__}; return the result, or what replace() of "
            "dataclasses makes of it"
        )
    return result


def _resource_contents(uri: str, value: object, mime_type: str | None) -> dict[str, Any]:
    """Return the content of a resource as MCP's JSON. Raises TypeError if JSON cannot hold it."""
    if isinstance(value, bytes):
        return contents(uri, value, mime_type or "application/octet-stream")
    if isinstance(value, str):
        return contents(uri, value, mime_type or "text/plain")
    result = ToolResult.of(value)
    return contents(
        uri, result.content[0]["text"] if result.content else "null", mime_type or "application/json"
    )


def _messages(value: object, method: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt as MCP's JSON. Raises TypeError for other types."""
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    messages = []
    for item in parts:
        message = item if isinstance(item, PromptMessage) else PromptMessage(item)
        if not isinstance(message.content, str | Content):
            raise TypeError(
                f"expected text, content or messages from {method}, got {type(message.content).__name__}"
            )
        messages.append(message.to_mcp())
    return messages


def _check_completion(values: object, method: str) -> ArgumentCompletion:
    """Return the completions of an argument. Raises TypeError if they are not a list of strings."""
    items = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if items is None or not all(isinstance(value, str) for value in items):
        raise TypeError(f"expected a list of texts from {method}, got {values!r:.200}")
    return ArgumentCompletion(
        values=items[:MAX_COMPLETIONS], total=len(items), has_more=len(items) > MAX_COMPLETIONS
    )
