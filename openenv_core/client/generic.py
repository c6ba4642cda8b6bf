"""GenericEnvClient: a client of any environment, with dicts instead of models."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from openenv_core.client.env_client import EnvClient
from openenv_core.types import StepResult

Json: TypeAlias = dict[str, Any]


class GenericAction(dict[str, Any]):
    """An action as a dict of its fields: `GenericAction(code="1 + 1")` is `{"code": "1 + 1"}`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def __repr__(self) -> str:
        return f"GenericAction({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class GenericEnvClient(EnvClient[Json, Json, Json]):
    """A client that needs no models: actions, observations and states are dicts."""

    def _step_payload(self, action: Json) -> Json:
        if not isinstance(action, Mapping):
            raise TypeError(f"expected a dict of the action's fields, got {type(action).__name__}")
        return dict(action)

    def _parse_result(self, payload: Json) -> StepResult[Json]:
        return StepResult(
            payload.get("observation") or {},
            payload.get("reward"),
            payload.get("done", False),
            payload.get("metadata"),
        )

    def _parse_state(self, payload: Json) -> Json:
        return payload
