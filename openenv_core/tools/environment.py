"""An environment whose actions are calls of tools."""

from typing import Any, overload

from openenv_core.environment import Environment
from openenv_core.tools.toolset import DeclaredTools
from openenv_core.tools.wire import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    ToolAction,
    ToolObservation,
)
from openenv_core.types import StateT


class ToolEnvironment(DeclaredTools, Environment[ToolAction, Any, StateT]):
    """Authors write `reset`, `state` and the tools; `openenv_core.tools.declare` says how those are declared.

    An environment with actions of its own has tools beside them by `DeclaredTools`.
    """

    # An asynchronous tool's observation is yet to be awaited. Type checkers are told Any of that, so that whoever steps
    # needs no assertion that it is not.
    @overload
    def step(self, action: CallToolAction) -> CallToolObservation | Any: ...

    @overload
    def step(self, action: ListToolsAction) -> ListToolsObservation | Any: ...

    @overload
    def step(self, action: ToolAction) -> ToolObservation | Any: ...

    def step(self, action: ToolAction) -> ToolObservation | Any:
        """List the tools, or call one.

        Raises:
            EpisodeOverError: There is no episode under way.
        """
        return self.tool_step(action)
