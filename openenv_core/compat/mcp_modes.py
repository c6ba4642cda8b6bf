"""Tools that an environment for the released package has in one mode alone."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from pydantic import TypeAdapter

from openenv_core.errors import ConfigurationError
from openenv_core.tools import ToolSpec

MODES: Final = ("production", "simulation")


def checked_mode(mode: str | None) -> str | None:
    """Return the mode.

    Raises:
        ConfigurationError: There is no such mode.
    """
    if mode is not None and mode not in MODES:
        raise ConfigurationError(f"expected mode to be one of {', '.join(MODES)}, or None, got {mode!r}")
    return mode


class ModeTools:
    """Functions by name and mode; the server object does not know them."""

    def __init__(self) -> None:
        self._functions: dict[str, dict[str, Callable[..., Any]]] = {}
        self._specs: dict[str, dict[str, ToolSpec]] = {}

    def add(self, mode: str, function: Callable[..., Any]) -> None:
        """Have a function in a mode."""
        name = function.__name__
        spec = ToolSpec(
            name=name, description=inspect.getdoc(function) or "", input_schema=_schema_of(function)
        )
        self._functions.setdefault(name, {})[mode] = function
        self._specs.setdefault(name, {})[mode] = spec

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def function(self, name: str, mode: str | None) -> Callable[..., Any] | None:
        """Return a function; None where the mode does not have it."""
        return self._functions.get(name, {}).get(mode or "")

    def functions(self, mode: str | None) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of a mode."""
        return {name: by_mode[mode] for name, by_mode in self._functions.items() if mode and mode in by_mode}

    def specs(self, mode: str | None) -> list[ToolSpec]:
        """Return what there is to tell of the functions of a mode."""
        return [by_mode[mode] for by_mode in self._specs.values() if mode and mode in by_mode]


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
    schema = adapter.json_schema()
    schema.setdefault("properties", {})
    return {**schema, "type": "object"}
