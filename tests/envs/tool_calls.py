"""Helpers that tests of several environments share."""

from collections.abc import Callable
from typing import Any

from openenv_core.tools import CallToolAction, CallToolObservation


def calls_of(environment: Any) -> Callable[[str, dict[str, Any]], CallToolObservation]:
    """Return a function that calls a tool of an environment that is played in-process."""

    def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
        seen = environment.step(CallToolAction(tool_name=name, arguments=arguments))
        assert isinstance(seen, CallToolObservation)
        return seen

    return call
