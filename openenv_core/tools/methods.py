"""A method that was declared as something: the function behind it, and what is known of that."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from openenv_core.errors import ConfigurationError
from openenv_core.tools.declare import function_of
from openenv_core.tools.docstrings import Docstring, read_docstring

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
