"""What a class declares, worked out once, and the answers that are given of it."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from openenv_core.environment import Environment
from openenv_core.errors import ConfigurationError, EpisodeOverError
from openenv_core.protocol.errors import text_of
from openenv_core.tools.context import SILENT, ToolContext
from openenv_core.tools.declare import Declared, Method, declared_as
from openenv_core.tools.results import (
    ArgumentCompletion,
    PromptResult,
    ResourceContents,
    ToolResult,
    apart,
    checked_result,
    completed,
    failure,
    messages,
    now,
    resource_contents,
)
from openenv_core.tools.signature import Returned, Signature, returned_by
from openenv_core.tools.specs import (
    AddressForm,
    PromptArgument,
    PromptSpec,
    ResourceSpec,
    ResourceTemplateSpec,
    ToolSpec,
)
from openenv_core.tools.wire import (
    RESERVED_TOOL_NAMES,
    CallToolAction,
    CallToolObservation,
    InvalidArgumentsError,
    ListToolsAction,
    ListToolsObservation,
    NoSuchPromptError,
    NoSuchResourceError,
    ToolAction,
    ToolErrorType,
    ToolObservation,
)

MAX_NAME_CHARS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_./-]+")
"""What MCP allows in the name of a tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredTool:
    """A tool, and the method behind it."""

    spec: ToolSpec
    attribute: str
    signature: Signature
    returned: Returned
    asynchronous: bool
    timeout_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredResource:
    """A resource, or a form of many, and the method behind it."""

    spec: ResourceSpec | ResourceTemplateSpec
    attribute: str
    signature: Signature
    form: AddressForm


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredPrompt:
    """A prompt, and the method behind it."""

    spec: PromptSpec
    attribute: str
    signature: Signature


@dataclass(frozen=True, slots=True)
class Toolset:
    """All that a class declares.

    Attributes:
        tools: By name, in the order of the source; those of base classes first.
        resources: Single addresses.
        templates: Forms of many.
        prompts: By name.
        completions: Names of methods, by what they complete and the argument's name.
    """

    tools: dict[str, DeclaredTool] = field(default_factory=dict)
    resources: dict[str, DeclaredResource] = field(default_factory=dict)
    templates: dict[str, DeclaredResource] = field(default_factory=dict)
    prompts: dict[str, DeclaredPrompt] = field(default_factory=dict)
    completions: dict[tuple[tuple[str, str], str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, owner: type) -> "Toolset":
        """Work out what a class declares.

        A method that overrides a declared one is declared as that was. One that is set to None is declared no more.

        Raises:
            ConfigurationError: A declaration contradicts itself, or two of them each other.
        """
        found = cls()
        for attribute, declarations in _declarations(owner).items():
            if getattr(owner, attribute) is None:
                continue
            method = Method.of(owner, attribute)
            for declared in declarations:
                _ADDING[declared.kind](found, declared, method)
        found._check_completions()
        return found

    def _add_tool(self, declared: Declared, method: Method) -> None:
        name = declared.name or method.attribute
        if name in RESERVED_TOOL_NAMES:
            raise ConfigurationError(
                f"expected a tool with a name of its own, got {name!r}; {', '.join(sorted(RESERVED_TOOL_NAMES))} are "
                "what clients call themselves"
            )
        if not 1 <= len(name) <= MAX_NAME_CHARS:
            raise ConfigurationError(
                f"expected a tool with a name of 1 to {MAX_NAME_CHARS} characters, got one of {len(name)}"
            )
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"expected a tool with a name of letters without accents, digits, and _ - . /, got {name!r}; hosts "
                "refuse others: give it one by @tool(name=...)"
            )
        if name in self.tools:
            raise ConfigurationError(f"expected tools with names of their own, got {name!r} twice")
        if declared.timeout_s is not None and not method.asynchronous:
            raise ConfigurationError(
                f"expected an asynchronous tool for timeout_s, got {name!r}; no thread can be stopped: make it "
                "`async def`, or leave the bound to the server's limit on a step"
            )
        signature, returned = Signature(method), returned_by(method)
        spec = ToolSpec(
            name=name,
            title=declared.title,
            description=_description(declared, method),
            input_schema=signature.schema,
            output_schema=returned.schema,
            annotations=_plain(declared.annotations),
            meta=_plain(declared.meta),
        )
        self.tools[name] = DeclaredTool(
            spec=spec,
            attribute=method.attribute,
            signature=signature,
            returned=returned,
            asynchronous=method.asynchronous,
            timeout_s=declared.timeout_s,
        )

    def _add_resource(self, declared: Declared, method: Method) -> None:
        form, signature = AddressForm(declared.uri), Signature(method)
        if sorted(form.names) != sorted(signature.names):
            raise ConfigurationError(
                f"expected {method.attribute} to take the values in {declared.uri!r}, "
                f"{', '.join(form.names) or 'none'}, got {', '.join(signature.names) or 'none'}"
            )
        told: dict[str, Any] = {
            "name": declared.name or method.attribute,
            "title": declared.title,
            "description": _description(declared, method) or None,
            "mime_type": declared.mime_type,
            "meta": _plain(declared.meta),
        }
        spec = (
            ResourceTemplateSpec(uri_template=declared.uri, **told)
            if form.names
            else ResourceSpec(uri=declared.uri, **told)
        )
        there = self.templates if form.names else self.resources
        if declared.uri in there:
            raise ConfigurationError(
                f"expected resources with addresses of their own, got {declared.uri!r} twice"
            )
        there[declared.uri] = DeclaredResource(
            spec=spec, attribute=method.attribute, signature=signature, form=form
        )

    def _add_prompt(self, declared: Declared, method: Method) -> None:
        name, signature = declared.name or method.attribute, Signature(method)
        if name in self.prompts:
            raise ConfigurationError(f"expected prompts with names of their own, got {name!r} twice")
        properties = signature.schema["properties"]
        spec = PromptSpec(
            name=name,
            title=declared.title,
            description=_description(declared, method) or None,
            arguments=tuple(
                PromptArgument(
                    name=argument,
                    description=properties[argument].get("description"),
                    required=argument in signature.required,
                )
                for argument in signature.names
            ),
            meta=_plain(declared.meta),
        )
        self.prompts[name] = DeclaredPrompt(spec=spec, attribute=method.attribute, signature=signature)

    def _add_completion(self, declared: Declared, method: Method) -> None:
        self.completions[declared.completes, declared.argument] = method.attribute

    def _check_completions(self) -> None:
        for (kind, of), argument in self.completions:
            there: Mapping[str, DeclaredPrompt | DeclaredResource] = (
                self.prompts if kind == "ref/prompt" else self.templates
            )
            if of not in there or argument not in there[of].signature.names:
                raise ConfigurationError(
                    f"expected a completion of an argument that is there, got {argument!r} of {of!r}; declare a prompt "
                    "of that name, or a resource of that form, which takes it"
                )


_ADDING: Final[dict[str, Callable[[Toolset, Declared, Method], None]]] = {
    "tool": Toolset._add_tool,
    "resource": Toolset._add_resource,
    "prompt": Toolset._add_prompt,
    "completion": Toolset._add_completion,
}


def _declarations(owner: type) -> dict[str, tuple[Declared, ...]]:
    found: dict[str, tuple[Declared, ...]] = {}
    for cls in reversed(owner.__mro__):
        for attribute, value in vars(cls).items():
            if declared := declared_as(value):
                found[attribute] = declared
    return found


def _description(declared: Declared, method: Method) -> str:
    return method.docstring.description if declared.description is None else declared.description


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if given is None else dict(given)


T = TypeVar("T")
Now: TypeAlias = T | Awaitable[T]
"""The value, or what is awaited for it: methods may be `def` or `async def`."""


class ToolHost(Protocol):
    """An environment with tools, and maybe resources and prompts.

    `ToolEnvironment` is one whose class declares them. Any other environment may have these methods of its own.
    """

    def list_tools(self) -> Now[Sequence[ToolSpec]]:
        """Return the tools that there are."""

    def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[ToolResult]:
        """Call a tool. What the tool does wrong is in the result.

        Raises:
            EpisodeOverError: The episode has ended.
        """

    def list_resources(self) -> Now[Sequence[ResourceSpec]]:
        """Return what there is to read."""

    def list_resource_templates(self) -> Now[Sequence[ResourceTemplateSpec]]:
        """Return the forms of addresses that can be read."""

    def read_resource(self, uri: str, context: ToolContext) -> Now[ResourceContents]:
        """Read a resource.

        Raises:
            NoSuchResourceError: There is none at that address.
        """

    def list_prompts(self) -> Now[Sequence[PromptSpec]]:
        """Return the prompts that there are."""

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt.

        Raises:
            NoSuchPromptError: There is none of that name.
            InvalidArgumentsError: The arguments are not those that it takes.
        """

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[ArgumentCompletion]:
        """Return what an argument that somebody is typing could become.

        Args:
            ref: In MCP's own JSON: `{"type": "ref/prompt", "name": ...}` or `{"type": "ref/resource", "uri": ...}`.
            argument: `{"name": ..., "value": ...}`.
            context: The call's.
        """


def is_tool_host(environment: object) -> bool:
    """Whether an environment, or a class of them, has tools to list and to call."""
    return callable(getattr(environment, "list_tools", None)) and callable(
        getattr(environment, "call_tool", None)
    )


def check_names(cls: type, *bases: type) -> None:
    """Hold declared methods against those by which a server reaches the environment.

    Raises:
        ConfigurationError: One has such a method's name, and would be called in its place.
    """
    taken = {name for base in (*bases, Environment) for name in dir(base)} | {"reset", "step"}
    for owner in cls.__mro__:
        for name in vars(owner).keys() & taken:
            if declared_as(vars(owner)[name]):
                raise ConfigurationError(
                    f"expected a method with a name of its own, got {owner.__qualname__}.{name}, which servers call "
                    f"for another reason; call the method otherwise, and declare it as name={name!r}"
                )


def check_hooks(cls: type, hooks: Iterable[str] = ("before_call", "after_call")) -> None:
    """Hold the hooks against what they are called as.

    Raises:
        ConfigurationError: One is asynchronous.
    """
    for name in hooks:
        if inspect.iscoroutinefunction(getattr(cls, name, None)):
            raise ConfigurationError(
                f"expected a plain {name}, got {cls.__qualname__}.{name}, which is asynchronous; what has to wait "
                "belongs in the tool"
            )


class DeclaredTools:
    """What a class that declares tools beside its actions is a `ToolHost` by: all of `ToolEnvironment` but the step.

    A call is the same whether it comes as a step or over MCP: it goes through `call_tool`, and is a step of the
    episode. What a tool raises is told to the caller as the call's error, and the session lives on; an
    `EpisodeOverError` is told as that.

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
            EpisodeOverError: There is no episode under way.
        """
        return None

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Be told what a call came to, a failed one too, and return what it is worth: see `reward` and `done`."""
        return result

    def tool_step(self, action: ToolAction) -> Now[ToolObservation]:
        """List the tools, or call one, as a step.

        Raises:
            EpisodeOverError: There is no episode under way.
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
            EpisodeOverError: There is no episode under way.
        """
        if (result := self.before_call(name, arguments)) is not None:
            return checked_result("before_call", result)
        if (tool := self.TOOLSET.tools.get(name)) is None:
            there_are = ", ".join(self.TOOLSET.tools) or "none"
            message = f"expected one of the tools {there_are}, got {name[:200]!r}"
            return self._after(name, arguments, ToolResult.failed(ToolErrorType.TOOL_NOT_FOUND, message))
        try:
            given = tool.signature.read(arguments, context)
        except InvalidArgumentsError as error:
            return self._after(name, arguments, ToolResult.failed(ToolErrorType.INVALID_ARGS, text_of(error)))
        except Exception as error:  # of a validator that the author has written
            return self._after(name, arguments, failure(error))
        method: Callable[..., Any] = getattr(self, tool.attribute)
        if tool.asynchronous:
            return self._call_async(tool, arguments, lambda: method(**given))
        try:
            result = ToolResult.of(now(method(**given), tool.attribute), wrapped=tool.returned.wrapped)
        except (EpisodeOverError, KeyboardInterrupt):
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
            NoSuchResourceError: The class declares none there, or says that there is none.
        """
        for one in (*self.TOOLSET.resources.values(), *self.TOOLSET.templates.values()):
            if (values := one.form.match(uri)) is not None:
                return self._read(one, uri, values, context)
        raise NoSuchResourceError(
            f"expected the address of a resource, got {uri[:200]!r}, where there is none"
        )

    def list_prompts(self) -> Sequence[PromptSpec]:
        """Return the prompts that the class declares."""
        return [one.spec for one in self.TOOLSET.prompts.values()]

    def get_prompt(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> Now[PromptResult]:
        """Return the messages of a prompt.

        Raises:
            NoSuchPromptError: The class declares none of that name.
            InvalidArgumentsError: The arguments are not those that it takes.
        """
        if (one := self.TOOLSET.prompts.get(name)) is None:
            there_are = ", ".join(self.TOOLSET.prompts) or "none"
            raise NoSuchPromptError(f"expected one of the prompts {there_are}, got {name[:200]!r}")
        given = one.signature.read(arguments, context, strict=False)
        description = one.spec.description
        return _then(
            getattr(self, one.attribute)(**given),
            lambda said: PromptResult(messages=messages(said, one.attribute), description=description),
        )

    def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, Any], context: ToolContext
    ) -> Now[ArgumentCompletion]:
        """Return what an argument could become; nothing where the class declares no completion of it."""
        kind = str(ref.get("type"))
        of = (kind, str(ref.get("name" if kind == "ref/prompt" else "uri")))
        method = self.TOOLSET.completions.get((of, str(argument.get("name"))))
        if method is None:
            return ArgumentCompletion(values=[])
        return _then(
            getattr(self, method)(str(argument.get("value", ""))), lambda values: completed(values, method)
        )

    def _read(
        self, one: DeclaredResource, uri: str, values: Mapping[str, str], context: ToolContext
    ) -> Now[ResourceContents]:
        try:
            given = one.signature.read(values, context, strict=False)
        except InvalidArgumentsError as error:
            form = one.form.template
            raise NoSuchResourceError(
                f"expected an address like {form}, got {uri[:200]!r}; {error}"
            ) from None
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
        except (EpisodeOverError, KeyboardInterrupt):
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
