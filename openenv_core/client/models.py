"""Conversion between a client's models and the wire, with hooks that subclasses may override."""

from collections.abc import Mapping
from typing import Any, Generic, cast

from pydantic import ValidationError

from openenv_core.errors import ProtocolError
from openenv_core.protocol.jsonio import reader
from openenv_core.types import Action, ActT, ObsT, State, StateT, StepResult


class ClientModels(Generic[ActT, ObsT, StateT]):
    """Encodes actions, and decodes observations and states, with the models that a subclass names."""

    action_type: type[ActT]
    observation_type: type[ObsT]
    state_type: type[StateT]

    def __init__(self) -> None:
        observation_type = getattr(self, "observation_type", None)
        self._read_observation = None if observation_type is None else reader(observation_type)
        self._read_state = reader(getattr(self, "state_type", None) or State)

    def _step_payload(self, action: ActT) -> Any:
        """Return the data of a step frame: a model, or a dict of the action's fields."""
        expected = getattr(self, "action_type", Action)
        if not isinstance(action, (expected, Mapping)):
            raise TypeError(
                f"expected {expected.__name__} or a dict of its fields, got {type(action).__name__}; "
                f"pass {expected.__name__}(...)"
            )
        return action

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ObsT]:
        """Decode the data of an observation frame."""
        fields = payload.get("observation")
        read = self._read_observation
        if not isinstance(fields, dict) or read is None:
            raise self._unreadable("observation", payload, None)
        reward = fields["reward"] = payload.get("reward")
        done = fields["done"] = payload.get("done", False)
        try:
            return StepResult(read(fields), reward, done, payload.get("metadata"))
        except ValidationError as error:
            raise self._unreadable("observation", payload, error) from error

    def _parse_state(self, payload: dict[str, Any]) -> StateT:
        """Decode the data of a state frame."""
        try:
            return cast(StateT, self._read_state(payload))
        except ValidationError as error:
            raise self._unreadable("state", payload, error) from error

    def _unreadable(self, kind: str, payload: object, error: ValidationError | None) -> ProtocolError:
        expected = getattr(self, f"{kind}_type", None)
        if expected is None:
            return ProtocolError(
                f"expected {kind}_type on {type(self).__name__}, got none; set it to the model"
            )
        return ProtocolError(
            f"expected {expected.__name__} from the server, got {str(payload)[:200]}"
            f"{f': {error}' if error else ''}; check that client and server have the same version"
        )
