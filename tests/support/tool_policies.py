"""Scripted policies of environments of tools: what they are given, and how they call."""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

from openenv_core.tools import CallToolObservation

Call: TypeAlias = Callable[[str, dict[str, Any]], CallToolObservation]
"""Calls a tool, given its name and arguments, and returns the observation."""

Policy: TypeAlias = Callable[[str, Call, random.Random], float]
"""Plays a task, given its text, and returns the total reward."""


class SolverError(Exception):
    """A scripted policy received something it cannot handle."""


class ToolUser:
    """Calls tools for a scripted policy.

    Attributes:
        total: Sum of the rewards so far.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.total = 0.0

    def use(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool and return its result.

        Raises:
            SolverError: The tool failed.
        """
        observation = self._call(name, arguments)
        self.total += float(observation.reward or 0.0)
        if observation.error is not None:
            raise SolverError(f"{name}({arguments}) failed: {observation.error.message}")
        return observation.result
