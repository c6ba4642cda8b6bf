"""The client of a server of the shop."""

from typing import Any

from openenv_core import MCPToolClient, StepResult

from .models import ShopObservation, ShopState


class ShopEnv(MCPToolClient):
    """Plays the shop behind a server: at a URL, or with `from_process()` in a process of its own.

    `reset` takes, besides `seed` and `episode_id`, the options `split`, `index`, `difficulty` and `max_calls`.
    `call_tool` returns what a tool gave; `step(CallToolAction(...))` what it earned as well.
    """

    state_type = ShopState
    # The folder goes by two names, envs.shop_env here and shop_env once installed by itself.
    default_app = f"{__package__}.server.app:app"

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        """Read what a reset answers as its own model, and the rest as tools answer."""
        seen = payload["observation"]
        if "task" not in seen:
            return super()._parse_result(payload)
        return StepResult(ShopObservation.model_validate(seen), None, False, payload.get("metadata"))
