"""How an author says which methods of an environment are tools, resources and prompts."""

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints, overload

from openenv_core.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

MARK: Final = "__ropewalk_declared__"
"""The attribute of a function that holds all that it was declared as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What a method was declared as.

    Attributes:
        kind: What it is.
        name: What it is called; None: as the method.
        title: A name to show to people.
        description: What it is for; None: as the docstring says.
        uri: Of a resource: an address, or the form of many.
        mime_type: Of a resource's content.
        annotations: Of a tool: hints of MCP's.
        timeout_s: Of an asynchronous tool: seconds that a call may take.
        completes: Of a completion: what it completes an argument of, as MCP refers to it.
        argument: Of a completion: the argument.
        meta: Whatever else, for those who know it.
    """

    kind: Literal["tool", "resource", "prompt", "completion"]
    name: str | None = None
    title: str | None = None
    description: str | None = None
    uri: str = ""
    mime_type: str | None = None
    annotations: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    completes: tuple[str, str] = ("", "")
    argument: str = ""
    meta: Mapping[str, Any] | None = field(default=None)


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    annotations: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    annotations: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> F | Callable[[F], F]:
    """Declare that a method is a tool.

    Its arguments are described by its types and its docstring. What it returns is told as it is: plain values, models,
    dataclasses, content (`Image` and its kin). A `ToolFailedError` that it raises tells the caller why it failed.

    Args:
        function: The method, where the decorator stands without parentheses.
        name: What callers call it; by default as the method.
        title: A name to show to people.
        description: What it is for; by default as the docstring says.
        annotations: Hints of MCP's: readOnlyHint, destructiveHint, idempotentHint, openWorldHint.
        timeout_s: Seconds that a call may take. Only asynchronous methods have such a bound, since no thread can be
            stopped; others are bounded by the server's own limit on a step.
        meta: Whatever else, for callers who know it.
    """
    declared = Declared(
        kind="tool",
        name=name,
        title=title,
        description=description,
        annotations=annotations,
        timeout_s=timeout_s,
        meta=meta,
    )
    return _marked(declared) if function is None else _marked(declared)(function)


def resource(
    uri: str,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    mime_type: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """Declare that a method returns what is at an address: text, bytes, or anything that JSON can hold.

    Args:
        uri: The address, or the form of many: `notes://{title}`, and `files://{+path}` for a value with slashes. The
            method takes an argument for each value.
        name: What it is called; by default as the method.
        title: A name to show to people.
        description: What it is; by default as the docstring says.
        mime_type: Of the content; by default text/plain, application/octet-stream or application/json.
        meta: Whatever else, for callers who know it.
    """
    return _marked(
        Declared(
            kind="resource",
            uri=uri,
            name=name,
            title=title,
            description=description,
            mime_type=mime_type,
            meta=meta,
        )
    )


@overload
def prompt(function: F, /) -> F: ...


@overload
def prompt(
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Callable[[F], F]: ...


def prompt(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> F | Callable[[F], F]:
    """Declare that a method returns messages to begin a conversation with: text, a `Message`, or a list of them.

    Args:
        function: The method, where the decorator stands without parentheses.
        name: What it is called; by default as the method.
        title: A name to show to people.
        description: What it is for; by default as the docstring says.
        meta: Whatever else, for callers who know it.
    """
    declared = Declared(kind="prompt", name=name, title=title, description=description, meta=meta)
    return _marked(declared) if function is None else _marked(declared)(function)


def completion(*, argument: str, prompt: str | None = None, resource: str | None = None) -> Callable[[F], F]:
    """Declare that a method, given what somebody has typed, returns what an argument could become: a list of texts.

    Args:
        argument: The argument.
        prompt: The name of the prompt that it is of.
        resource: Or the form of the addresses that it is a value of.

    Raises:
        ConfigurationError: It is of neither, or of both.
    """
    if (prompt is None) == (resource is None):
        raise ConfigurationError(
            "expected a completion of a prompt's argument or of a resource's, got neither or both"
        )
    completes = ("ref/prompt", prompt) if prompt is not None else ("ref/resource", resource or "")
    return _marked(Declared(kind="completion", completes=completes, argument=argument))


def _marked(declared: Declared) -> Callable[[F], F]:
    def mark(function: F) -> F:
        method = function_of(function)
        if not callable(method) or not hasattr(method, "__name__"):
            raise ConfigurationError(
                f"expected a method below @{declared.kind}, got {type(function).__name__}; a property, for one, takes "
                "no arguments: write a method that returns it"
            )
        setattr(method, MARK, (*getattr(method, MARK, ()), declared))
        return function

    return mark


def function_of(attribute: object) -> object:
    """Return the function in what a class has as an attribute, where it has been made static or the class's."""
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def declared_as(attribute: object) -> tuple[Declared, ...]:
    """Return all that an attribute of a class was declared as.

    Raises:
        ConfigurationError: It was made a property since.
    """
    if isinstance(attribute, property | cached_property):
        inner = attribute.fget if isinstance(attribute, property) else attribute.func
        if getattr(inner, MARK, ()):
            raise ConfigurationError(
                f"expected a method, got the {type(attribute).__name__} {getattr(inner, '__name__', '')!r}; write a "
                "method that returns it"
            )
    declared = getattr(function_of(attribute), MARK, ())
    return declared if isinstance(declared, tuple) else ()


_SECTION: Final = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Attributes):\s*")
_ARGUMENT: Final = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring, taken apart.

    Attributes:
        description: Everything before the first section.
        arguments: What each argument is.
    """

    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str) -> Docstring:
    """Take the docstring of a function apart."""
    lines = inspect.cleandoc(text).splitlines()
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in lines:
        if (found := _SECTION.fullmatch(line)) is not None:
            current = found[1]
            sections.setdefault(current, [])
        else:
            sections[current].append(line)
    described = sections.get("Args", []) + sections.get("Arguments", [])
    return Docstring("\n".join(sections[""]).strip(), _arguments(described))


def _arguments(lines: list[str]) -> dict[str, str]:
    filled = [line for line in lines if line.strip()]
    if not filled:
        return {}
    indent = min(len(line) - len(line.lstrip()) for line in filled)
    found: dict[str, str] = {}
    name = None
    for line in filled:
        text = line.strip()
        begins = _ARGUMENT.fullmatch(text) if len(line) - len(line.lstrip()) == indent else None
        if begins is not None:
            name = begins[1]
            found[name] = begins[2]
        elif name is not None:
            found[name] = f"{found[name]} {text}".strip()
    return found


_AWAITABLE: Final = (Awaitable, Coroutine)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method of a class.

    Attributes:
        attribute: Its name in the class.
        name: What errors call it.
        parameters: Without the one that is the instance or the class.
        hints: Types of its parameters and, below `return`, of what it returns once that was awaited.
        docstring: Its own; where it overrides a method and has none, that one's.
        asynchronous: What it returns is to be awaited.
    """

    attribute: str
    name: str
    parameters: tuple[inspect.Parameter, ...]
    hints: dict[str, Any]
    docstring: Docstring
    asynchronous: bool

    @classmethod
    def of(cls, owner: type, attribute: str) -> "Method":
        """Find a method of a class.

        Raises:
            ConfigurationError: It is none, or has types that cannot be found.
        """
        held = inspect.getattr_static(owner, attribute)
        function = function_of(held)
        name = getattr(function, "__qualname__", f"{owner.__qualname__}.{attribute}")
        if not callable(function):
            raise ConfigurationError(
                f"expected a method {name}, as a base class declares it, got {type(function).__name__}; None takes the "
                "declaration back"
            )
        parameters = list(inspect.signature(function).parameters.values())
        hints = _hints(function, name)
        returned = hints.get("return")
        awaited = get_args(returned) if get_origin(returned) in _AWAITABLE else ()
        if awaited:
            hints["return"] = awaited[-1]
        return cls(
            attribute=attribute,
            name=name,
            parameters=tuple(parameters if isinstance(held, staticmethod) else parameters[1:]),
            hints=hints,
            docstring=_docstring(owner, attribute),
            # A decorator's wrapper may be a plain function that passes on what is to be awaited.
            asynchronous=bool(awaited) or inspect.iscoroutinefunction(inspect.unwrap(function)),
        )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        why = f"{error}; import them at the top of its module, not below TYPE_CHECKING"
    except Exception as error:  # an annotation in quotes can hold any mistake
        why = f"{type(error).__name__}: {error}"
    raise ConfigurationError(f"expected types that can be found where {name} is defined, got: {why}")


def _docstring(owner: type, attribute: str) -> Docstring:
    """Return what is said of a method, by it or by the nearest that it overrides."""
    functions = [function_of(vars(cls)[attribute]) for cls in owner.__mro__ if attribute in vars(cls)]
    texts = (getattr(function, "__doc__", None) for function in functions if callable(function))
    return read_docstring(next(filter(None, texts), ""))
