"""How an author says which methods of an environment are tools, resources and prompts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeVar, overload

from openenv_core.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

MARK: Final = "__ropewalk_declared__"
"""The attribute of a function that holds all that it was declared as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What a method was declared as; the decorators below say what each field is."""

    kind: Literal["tool", "resource", "prompt", "completion"]
    name: str | None = None
    title: str | None = None
    description: str | None = None
    meta: Mapping[str, Any] | None = None
    uri: str = ""  # of a resource
    mime_type: str | None = None
    annotations: Mapping[str, Any] | None = None  # of a tool
    timeout_s: float | None = None
    completes: tuple[str, str] = ("", "")  # of a completion: as MCP refers to a prompt or a resource
    argument: str = ""


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
    mark = _mark_as(
        "tool",
        name=name,
        title=title,
        description=description,
        annotations=annotations,
        timeout_s=timeout_s,
        meta=meta,
    )
    return mark if function is None else mark(function)


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
    """Declare a method as a resource: it returns the content at a URI as text, bytes, or any JSON value.

    Args:
        uri: The address, or the form of many: `notes://{title}`, and `files://{+path}` for a value with slashes. The
            method takes an argument for each value.
        name: What it is called; by default as the method.
        title: A name to show to people.
        description: What it is; by default as the docstring says.
        mime_type: Of the content; by default text/plain, application/octet-stream or application/json.
        meta: Whatever else, for callers who know it.
    """
    return _mark_as(
        "resource",
        uri=uri,
        name=name,
        title=title,
        description=description,
        mime_type=mime_type,
        meta=meta,
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
    mark = _mark_as("prompt", name=name, title=title, description=description, meta=meta)
    return mark if function is None else mark(function)


def completion(*, argument: str, prompt: str | None = None, resource: str | None = None) -> Callable[[F], F]:
    """Declare a method as a completion: given what the user has typed, it returns suggestions for an argument.

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
    return _mark_as("completion", completes=completes, argument=argument)


def _mark_as(kind: Literal["tool", "resource", "prompt", "completion"], **fields: Any) -> Callable[[F], F]:
    declared = Declared(kind=kind, **fields)

    def mark(function: F) -> F:
        method = function_of(function)
        if not callable(method) or not hasattr(method, "__name__"):
            raise ConfigurationError(
                f"expected a method below @{kind}, got {type(function).__name__}; a property, for one, takes "
                "no arguments: write a method that returns it"
            )
        setattr(method, MARK, (*getattr(method, MARK, ()), declared))
        return function

    return mark


def function_of(attribute: object) -> object:
    """Return the function in what a class has as an attribute, where it has been made static or the class's."""
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def declared_as(attribute: object) -> tuple[Declared, ...]:
    """Return all that an attribute of a class was declared as; a property of it is a ConfigurationError."""
    if isinstance(attribute, property | cached_property):
        inner = attribute.fget if isinstance(attribute, property) else attribute.func
        if getattr(inner, MARK, ()):
            raise ConfigurationError(
                f"expected a method, got the {type(attribute).__name__} {getattr(inner, '__name__', '')!r}; write a "
                "method that returns it"
            )
    declared = getattr(function_of(attribute), MARK, ())
    return declared if isinstance(declared, tuple) else ()
