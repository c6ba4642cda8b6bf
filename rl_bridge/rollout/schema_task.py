"""The default task of an environment in one file: observations in words, actions as JSON by the action's schema."""

import inspect
import json
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from openenv_core import MCPToolClient
from openenv_core.checker.drawing import sample
from openenv_core.errors import ConfigurationError
from openenv_core.making import client_of_file
from openenv_core.scaffold.task import describe_answer, only_field
from openenv_core.targets import target_of
from openenv_core.types import Observation
from rl_bridge.config import Config
from rl_bridge.config.schema import TOOL_WORLD_TASK
from rl_bridge.errors import ConfigError
from rl_bridge.rollout.task import Task
from rl_bridge.tokens.chat import ChatMessage

DRAWN: Final = 64
EXAMPLES: Final = 2
"""Answers in every prompt that show the form of an action."""


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
        if issubclass(client, MCPToolClient):
            raise ConfigError(
                f"expected rollout.task={TOOL_WORLD_TASK}, or a task of its own, for an environment of tools, got none"
            )
        self.client_type = client  # type: ignore[misc]  # of this run's environment
        self._action: TypeAdapter[Any] = TypeAdapter(client.action_type)
        self._field = only_field(client.action_type)
        self._rules = f"{inspect.getdoc(client) or app}\n{describe_answer(client.action_type)}"
        schema = self._action.json_schema()
        schema.get("properties", {}).pop("metadata", None)
        # The shortest that are drawn: they show the form, and cost tokens in every prompt.
        self._examples = sorted(map(self._write, sample(schema, DRAWN, 0)), key=len)[:EXAMPLES]

    def opening(self, rules: str | None = None) -> list[ChatMessage]:
        """Return what every prompt begins with: the rules, and answers drawn from the schema, which show its form.

        Args:
            rules: Replaces the docstring of the environment's class and the schema of its actions.
        """
        chat: list[ChatMessage] = [{"role": "system", "content": rules or self._rules}]
        for answer in self._examples:
            chat += [{"role": "user", "content": "..."}, {"role": "assistant", "content": answer}]
        return chat

    def messages(self, observation: Any) -> list[ChatMessage]:
        """Return the opening, and the observation's fields line by line."""
        fields = observation.model_dump(mode="json", exclude=set(Observation.model_fields))
        shown = "\n".join(f"{name}: {value}" for name, value in fields.items())
        return [*self.opening(), {"role": "user", "content": shown}]

    def parse(self, text: str) -> Any | None:
        """Return the action of an answer; None if it is no action."""
        text = text.strip()
        try:
            if self._field is not None and not text.startswith("{"):
                return self._action.validate_strings({self._field: text})
            return self._action.validate_json(text)
        except ValidationError:
            return None

    def _write(self, action: dict[str, Any]) -> str:
        """Return an action as an answer."""
        value = action if self._field is None else action[self._field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
