"""A class that declares tools: their calls, and all that MCP sees of it, are given."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from openenv_core.errors import EpisodeOver
from openenv_core.protocol.faults import text_of
from openenv_core.tools.authoring import check_hooks, check_names
from openenv_core.tools.context import SILENT, ToolContext
from openenv_core.tools.errors import InvalidArguments, NoSuchPrompt, NoSuchResource
from openenv_core.tools.host import Now
from openenv_core.tools.outcomes import (
    apart,
    checked_result,
    completed,
    failure,
    messages,
    now,
    resource_contents,
)
from openenv_core.tools.results import Completion, PromptResult, ResourceContents, ToolResult
from openenv_core.tools.specs import PromptSpec, ResourceSpec, ResourceTemplateSpec, ToolSpec
from openenv_core.tools.toolset import DeclaredResource, DeclaredTool, Toolset
from openenv_core.tools.wire import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    ToolAction,
    ToolErrorType,
    ToolObservation,
)

T = TypeVar("T")


class DeclaredTools:
    """What a class that declares tools beside its actions is a `ToolHost` by: all of `ToolEnvironment` but the step.

    A call is the same whether it comes as a step or over MCP: it goes through `call_tool`, and is a step of the
    episode. What a tool raises is told to the caller as the call's error, and the session lives on; an `EpisodeOver`
    is told as that.

    Attributes:
        TOOLSET: What the class declares.
        STEPS_MAY_WAIT: Some of the tools are asynchronous, so that `step` may return what is to be awaited.
    """

    TOOLSET: ClassVar[Toolset] = Toolset()
    STEPS_MAY_WAIT: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Work out what the class declares.

        Raises:
            ConfigurationError: A declaration contradicts itself.
        """
        super().__init_subclass__(**options)
        cls.TOOLSET = Toolset.of(cls)
        check_names(cls, DeclaredTools)
        check_hooks(cls)
        cls.STEPS_MAY_WAIT = any(tool.asynchronous for tool in cls.TOOLSET.tools.values())

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Be asked before each call, one of a tool that is not there too; what this returns is the call's result.

        Raises:
            EpisodeOver: There is no episode under way.
        """
        return None

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Be told what a call came to, a failed one too, and return what it is worth: see `reward` and `done`."""
        return result

    def tool_step(self, action: ToolAction) -> Now[ToolObservation]:
        """List the tools, or call one, as a step.

        Raises:
            EpisodeOver: There is no episode under way.
        """
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[spec.wire() for spec in self.list_tools()])
        result = self.call_tool(action.tool_name, action.arguments, SILENT)
        if isinstance(result, ToolResult):
            return result.observation(action.tool_name)
        return _observed(action, result)

    def list_tools(self) -> Sequence[ToolSpec]:
        """Return the tools that the class declares."""
        return [tool.spec for tool in self.TOOLSET.tools.values()]

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[ToolResult]:
        """Call a tool; what it does wrong is in the result.

        Raises:
            EpisodeOver: There is no episode under way.
        """
        if (result := self.before_call(name, arguments)) is not None:
            return checked_result("before_call", result)
        if (tool := self.TOOLSET.tools.get(name)) is None:
            there_are = ", ".join(self.TOOLSET.tools) or "none"
            message = f"expected one of the tools {there_are}, got {name[:200]!r}"
            return self._after(name, arguments, ToolResult.failed(ToolErrorType.TOOL_NOT_FOUND, message))
        try:
            given = tool.signature.read(arguments, context)
        except InvalidArguments as error:
            return self._after(name, arguments, ToolResult.failed(ToolErrorType.INVALID_ARGS, text_of(error)))
        except Exception as error:  # of a validator that the author has written
            return self._after(name, arguments, failure(error))
        method: Callable[..., Any] = getattr(self, tool.attribute)
        if tool.asynchronous:
            return self._call_async(tool, arguments, lambda: method(**given))
        try:
            result = ToolResult.of(now(method(**given), tool.attribute), wrapped=tool.returned.wrapped)
        except (EpisodeOver, KeyboardInterrupt):
            raise
        except BaseException as error:  # an exit, or the panic of a compiled library
            result = failure(error)
        return self._after(name, arguments, result)

    def list_resources(self) -> Sequence[ResourceSpec]:
        """Return the single addresses that the class declares."""
        return [one.spec for one in self.TOOLSET.resources.values() if isinstance(one.spec, ResourceSpec)]

    def list_resource_templates(self) -> Sequence[ResourceTemplateSpec]:
        """Return the forms of addresses that the class declares."""
        return [
            one.spec for one in self.TOOLSET.templates.values() if isinstance(one.spec, ResourceTemplateSpec)
        ]

    def read_resource(self, uri: str, context: ToolContext) -> Now[ResourceContents]:
        """Read what is at an address.

        Raises:
            NoSuchResource: The class declares none there, or says that there is none.
        """
        for one in (*self.TOOLSET.resources.values(), *self.TOOLSET.templates.values()):
            if (values := one.form.match(uri)) is not None:
                return self._read(one, uri, values, context)
        raise NoSuchResource(f"expected the address of a resource, got {uri[:200]!r}, where there is none")

    def list_prompts(self) -> Sequence[PromptSpec]:
        """Return the prompts that the class declares."""
        return [one.spec for one in self.TOOLSET.prompts.values()]

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt.

        Raises:
            NoSuchPrompt: The class declares none of that name.
            InvalidArguments: The arguments are not those that it takes.
        """
        if (one := self.TOOLSET.prompts.get(name)) is None:
            there_are = ", ".join(self.TOOLSET.prompts) or "none"
            raise NoSuchPrompt(f"expected one of the prompts {there_are}, got {name[:200]!r}")
        given = one.signature.read(arguments, context, strict=False)
        description = one.spec.description
        return _then(
            getattr(self, one.attribute)(**given),
            lambda said: PromptResult(messages=messages(said, one.attribute), description=description),
        )

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[Completion]:
        """Return what an argument could become; nothing where the class declares no completion of it."""
        kind = str(ref.get("type"))
        of = (kind, str(ref.get("name" if kind == "ref/prompt" else "uri")))
        method = self.TOOLSET.completions.get((of, str(argument.get("name"))))
        if method is None:
            return Completion(values=[])
        return _then(
            getattr(self, method)(str(argument.get("value", ""))), lambda values: completed(values, method)
        )

    def _read(
        self, one: DeclaredResource, uri: str, values: Mapping[str, str], context: ToolContext
    ) -> Now[ResourceContents]:
        try:
            given = one.signature.read(values, context, strict=False)
        except InvalidArguments as error:
            form = one.form.template
            raise NoSuchResource(f"expected an address like {form}, got {uri[:200]!r}; {error}") from None
        return _then(
            getattr(self, one.attribute)(**given),
            lambda held: [resource_contents(uri, held, one.spec.mime_type)],
        )

    async def _call_async(
        self, tool: DeclaredTool, arguments: Mapping[str, Any], call: Callable[[], Any]
    ) -> ToolResult:
        deadline = asyncio.timeout(tool.timeout_s)
        try:
            async with deadline:
                value = await apart(call)
            result = ToolResult.of(value, wrapped=tool.returned.wrapped)
        except (EpisodeOver, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            if deadline.expired():
                message = f"expected an end within {tool.timeout_s:g} s, got none; the call was given up"
                result = ToolResult.failed(ToolErrorType.TIMEOUT, message)
            else:
                result = failure(error)
        return self._after(tool.spec.name, arguments, result)

    def _after(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        return checked_result("after_call", self.after_call(name, arguments, result))


async def _observed(action: CallToolAction, result: Awaitable[ToolResult]) -> CallToolObservation:
    return (await result).observation(action.tool_name)


def _then(value: Any, form: Callable[[Any], T]) -> Now[T]:
    """Return what a method's value becomes; where that is yet to come, what is awaited for it."""
    if not inspect.isawaitable(value):
        return form(value)

    async def later() -> T:
        return form(await value)

    return later()
