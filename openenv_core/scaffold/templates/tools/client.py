"""The client of a Place Holder server."""

from typing import Any

from openenv_core import MCPToolClient, StepResult

from .models import PlaceHolderObservation, PlaceHolderState


class PlaceHolderEnv(MCPToolClient):
    """Plays Place Holder behind a server: at a URL, or with `from_process()` in a process of its own.

    `call_tool` returns what a tool gave; `step(CallToolAction(...))` what it earned as well.
    """

    state_type = PlaceHolderState
    default_app = f"{__package__}.server.app:app"

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        """Read what a reset answers as its own model, and the rest as tools answer."""
        observation = payload["observation"]
        if "task" not in observation:
            return super()._parse_result(payload)
        return StepResult(
            PlaceHolderObservation.model_validate(observation), None, False, payload.get("metadata")
        )
