"""An environment whose actions are calls of tools."""

from typing import Any

from openenv_core.environment import Environment
from openenv_core.tools.declared import DeclaredTools
from openenv_core.tools.host import Now
from openenv_core.tools.wire import ToolAction, ToolObservation
from openenv_core.types import StateT


class ToolEnvironment(DeclaredTools, Environment[ToolAction, Any, StateT]):
    """Authors write `reset`, `state` and the tools; `openenv_core.tools.declare` says how those are declared.

    An environment with actions of its own has tools beside them by `DeclaredTools`.
    """

    def step(self, action: ToolAction) -> Now[ToolObservation]:
        """List the tools, or call one.

        Raises:
            EpisodeOver: There is no episode under way.
        """
        return self.tool_step(action)
