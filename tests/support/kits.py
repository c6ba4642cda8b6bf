"""An environment that offers each episode the tools which its reset names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openenv_core import Observation, State
from openenv_core.tools import (
    ToolAction,
    ToolEnvironment,
    ToolErrorType,
    ToolObservation,
    ToolResult,
    ToolSpec,
    tool,
)
from servers import create_app


class Kits(ToolEnvironment[State]):
    """Offers `cut` and `drive` before the first reset. The first call of a tool pays 1 and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    DETERMINISTIC = True
    BLOCKING = False

    def __init__(self) -> None:
        self.kit: Sequence[str] = ("cut", "drive")

    def reset(self, seed: int | None = None, kit: Sequence[str] = ("cut", "drive")) -> Observation:
        self.kit = kit
        return Observation()

    @property
    def state(self) -> State:
        return State()

    def list_tools(self) -> Sequence[ToolSpec]:
        return [spec for spec in super().list_tools() if spec.name in self.kit]

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        if name in self.kit:
            return None
        return ToolResult.failed(ToolErrorType.TOOL_NOT_FOUND, f"no {name} in the kit")

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        return replace(result, reward=1.0, done=True)

    @tool
    def cut(self, length: int) -> str:
        """Cut the rope."""
        return f"cut at {length}"

    @tool
    def drive(self) -> str:
        """Drive a nail."""
        return "driven"

    @tool
    def weld(self) -> str:
        """Weld a joint."""
        return "welded"


app = create_app(Kits, ToolAction, ToolObservation, env_name="kits", max_concurrent_envs=16)
