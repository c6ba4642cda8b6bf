"""The client of a Place Holder server."""

from typing import Any

from openenv_core import MCPToolClient, StepResult

from .models import PlaceHolderObservation


class PlaceHolderEnv(MCPToolClient):
    """Plays Place Holder on a server: at a URL, or started by `from_process()`.

    `call_tool` returns a tool's result; `step(CallToolAction(...))` also has the reward.
    """

    default_app = f"{__package__}.server.app:app"

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        """Parse a reset's observation by its own model, all others as observations of tools."""
        observation = payload["observation"]
        if "task" not in observation:
            return super()._parse_result(payload)
        return StepResult(
            PlaceHolderObservation.model_validate(observation), None, False, payload.get("metadata")
        )
