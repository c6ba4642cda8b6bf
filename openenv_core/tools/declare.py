"""Decorators that declare methods of an environment as tools, resources, prompts and completions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, overload

from openenv_core.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

MARK: Final = "__ropewalk_declared__"
"""Attribute of a function that holds its declarations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """One declaration of a method; the fields are the arguments of the decorators below."""

    kind: Literal["tool", "resource", "prompt", "completion"]
    name: str | None = None
    title: str | None = None
    description: str | None = None
    meta: Mapping[str, Any] | None = None
    uri: str = ""  # of a resource
    mime_type: str | None = None
    annotations: Mapping[str, Any] | None = None  # of a tool
    timeout_s: float | None = None
    completes: tuple[str, str] = ("", "")  # of a completion: MCP's reference to a prompt or resource
    argument: str = ""


class Labels(TypedDict, total=False):
    """What every declaration but a completion may say of itself.

    Attributes:
        name: Name; by default the method's.
        title: Display name.
        description: Description; by default from the docstring.
        meta: Additional metadata, MCP's `_meta`.
    """

    name: str | None
    title: str | None
    description: str | None
    meta: Mapping[str, Any] | None


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *, annotations: Mapping[str, Any] | None = None, timeout_s: float | None = None, **labels: Unpack[Labels]
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    annotations: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    **labels: Unpack[Labels],
) -> F | Callable[[F], F]:
    """Declare a method as a tool.

    Types and docstring describe its arguments. It may return plain values, models, dataclasses or content (`Image`
    etc.). It raises `ToolFailedError` to tell the caller why it failed.

    Args:
        function: The method, if the decorator is used without parentheses.
        annotations: MCP's hints: readOnlyHint, destructiveHint, idempotentHint, openWorldHint.
        timeout_s: Seconds that a call may take. Only for asynchronous methods, because threads cannot be stopped; the
            others are limited by the server's step timeout.
        labels: The `Labels`.
    """
    mark = _mark_as("tool", annotations=annotations, timeout_s=timeout_s, **labels)
    return mark if function is None else mark(function)


def resource(uri: str, /, *, mime_type: str | None = None, **labels: Unpack[Labels]) -> Callable[[F], F]:
    """Declare a method as a resource: it returns the content at a URI as text, bytes or any JSON value.

    Args:
        uri: The URI, or a template: `notes://{title}`, or `files://{+path}` for a value with slashes. The method takes
            one argument per value.
        mime_type: Type of the content; by default text/plain, application/octet-stream or application/json.
        labels: The `Labels`.
    """
    return _mark_as("resource", uri=uri, mime_type=mime_type, **labels)


@overload
def prompt(function: F, /) -> F: ...


@overload
def prompt(**labels: Unpack[Labels]) -> Callable[[F], F]: ...


def prompt(function: F | None = None, /, **labels: Any) -> F | Callable[[F], F]:
    """Declare a method as a prompt: it returns the first messages of a conversation.

    It returns text, content, a `PromptMessage`, or a list of them.

    Args:
        function: The method, if the decorator is used without parentheses.
        labels: The `Labels`.
    """
    mark = _mark_as("prompt", **labels)
    return mark if function is None else mark(function)


def completion(*, argument: str, prompt: str | None = None, resource: str | None = None) -> Callable[[F], F]:
    """Declare a method as a completion: given the typed text, it returns suggestions for an argument.

    Args:
        argument: Name of the argument.
        prompt: Name of the prompt that has the argument.
        resource: Or the URI template that has it.

    Raises:
        ConfigurationError: Neither `prompt` nor `resource` is given, or both are.
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
    """Unwrap a staticmethod or classmethod; return other attributes unchanged."""
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def declared_as(attribute: object) -> tuple[Declared, ...]:
    """Return the declarations of a class's attribute. Raises `ConfigurationError` for a declared property."""
    if isinstance(attribute, property | cached_property):
        inner = attribute.fget if isinstance(attribute, property) else attribute.func
        if getattr(inner, MARK, ()):
            raise ConfigurationError(
                f"expected a method, got the {type(attribute).__name__} {getattr(inner, '__name__', '')!r}; write a "
                "method that returns it"
            )
    declared = getattr(function_of(attribute), MARK, ())
    return declared if isinstance(declared, tuple) else ()
