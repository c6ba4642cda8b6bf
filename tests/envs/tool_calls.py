"""Helpers that tests of several environments share."""

import json
from collections.abc import Callable
from typing import Any

from openenv_core.tools import CallToolAction, CallToolObservation, ToolContext


def calls_of(environment: Any) -> Callable[[str, dict[str, Any]], CallToolObservation]:
    """Return a function that calls a tool of an environment that is played in-process."""

    def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
        seen = environment.step(CallToolAction(tool_name=name, arguments=arguments))
        assert isinstance(seen, CallToolObservation)
        return seen

    return call


def visible_in(environment: Any, first: Any, index: int) -> str:
    """Return everything that an environment shows of a task of the training split before a call, as text."""
    shown = [
        first.model_dump(),
        environment.state.model_dump(),
        [tool.wire().model_dump() for tool in environment.list_tools()],
        [one.to_mcp() for one in (*environment.list_resources(), *environment.list_prompts())],
        environment.get_task("train", index),
        environment.get_metadata().model_dump(),
    ]
    return json.dumps(shown)


class RecordedContext(ToolContext):
    """Keeps what a tool tells its caller during a call."""

    def __init__(self) -> None:
        self.progressed: list[float] = []
        self.lists_changed = 0

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.progressed.append(progress)

    def tools_changed(self) -> None:
        self.lists_changed += 1
