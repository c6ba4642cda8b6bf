"""The client of a Place Holder server."""

from typing import Any, Final

from pydantic import TypeAdapter

from openenv_core import Action, EnvClient, Observation, ProtocolError, StepResult
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
)

from .models import PlaceHolderAnswer, PlaceHolderObservation, PlaceHolderState

_ANY_OBSERVATION: Final[TypeAdapter[Observation]] = TypeAdapter(PlaceHolderObservation | PlaceHolderAnswer)


class PlaceHolderEnv(EnvClient[Action, Any, PlaceHolderState]):
    """Plays Place Holder behind a server: at a URL, or with `from_process()` in a process of its own."""

    action_type = Action
    observation_type = Observation
    state_type = PlaceHolderState
    default_app = f"{__package__}.server.app:app"

    async def list_tools(self) -> list[Tool]:
        """Return the tools that there are. This is a step of the episode."""
        result = await self.step(ListToolsAction())
        if not isinstance(result.observation, ListToolsObservation):
            raise ProtocolError(
                f"expected a list of tools, got {type(result.observation).__name__}; "
                "check that client and server have the same version"
            )
        return result.observation.tools

    async def call_tool(self, name: str, **arguments: Any) -> StepResult[CallToolObservation]:
        """Call a tool. What it returned, or why it did not, is in the observation's `result` and `error`."""
        result = await self.step(CallToolAction(tool_name=name, arguments=arguments))
        if not isinstance(result.observation, CallToolObservation):
            raise ProtocolError(
                f"expected the result of a tool, got {type(result.observation).__name__}; "
                "check that client and server have the same version"
            )
        return StepResult(result.observation, result.reward, result.done, result.metadata)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        """Read the observation as the model that it is: which one depends on what was asked."""
        seen = _ANY_OBSERVATION.validate_python(
            {**payload["observation"], "reward": payload.get("reward"), "done": payload.get("done", False)}
        )
        return StepResult(seen, seen.reward, seen.done, payload.get("metadata"))
