"""The default task of an environment in one file: observations in words, actions as JSON by the action's schema."""

import inspect
from typing import Any

from pydantic import TypeAdapter, ValidationError

from openenv_core.errors import ConfigurationError
from openenv_core.making import client_of_file
from openenv_core.scaffold.task import describe_answer
from openenv_core.targets import target_of
from openenv_core.types import Observation
from rl_bridge.config import Config
from rl_bridge.errors import ConfigError
from rl_bridge.rollout.task import Task
from rl_bridge.tokens.chat import ChatMessage


class SchemaTask(Task):
    """Shows the docstring of the environment's class and the schema of its actions, then each observation in words.

    An answer is the action's fields as a JSON object; for an action of one field its value is enough. Subclasses
    override `messages` and `parse`.
    """

    def __init__(self, config: Config, folder: Any) -> None:
        super().__init__(config, folder)
        if (app := config.environment.app) is None:
            raise ConfigError("expected env.app to be a Python file with the environment, or a rollout.task")
        try:
            client = client_of_file(target_of(app).text)
        except ConfigurationError as error:
            raise ConfigError(f"env.app: {error}") from error
        if client is None:
            raise ConfigError(f"env.app: expected a Python file with an environment's class, got {app!r}")
        self.client_type = client  # type: ignore[misc]  # of this run's environment
        self._action: TypeAdapter[Any] = TypeAdapter(client.action_type)
        self._field = _only_field(client.action_type)
        self._rules = f"{inspect.getdoc(client) or app}\n{describe_answer(client.action_type)}"

    def messages(self, observation: Any) -> list[ChatMessage]:
        """Return the rules, and the observation's fields line by line."""
        fields = observation.model_dump(mode="json", exclude=set(Observation.model_fields))
        shown = "\n".join(f"{name}: {value}" for name, value in fields.items())
        return [{"role": "system", "content": self._rules}, {"role": "user", "content": shown}]

    def parse(self, text: str) -> Any | None:
        """Return the action of an answer; None if it is no action."""
        text = text.strip()
        try:
            if self._field is not None and not text.startswith("{"):
                return self._action.validate_strings({self._field: text})
            return self._action.validate_json(text)
        except ValidationError:
            return None


def _only_field(action: Any) -> str | None:
    """Return the name of an action's field if it has one beside its metadata."""
    names = [name for name in getattr(action, "model_fields", ()) if name != "metadata"]
    return names[0] if len(names) == 1 else None
