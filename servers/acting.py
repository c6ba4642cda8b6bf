"""The actions of an environment without tools, offered as tools to the agent of an MCP host."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from openenv_core.errors import describe_faults
from openenv_core.protocol.frames import Reset, encode_model
from openenv_core.protocol.jsonio import from_json
from openenv_core.tools import ToolContext, ToolErrorType, ToolResult, ToolSpec
from openenv_core.types import Action, Observation
from servers.routes.description import describe_reset
from servers.sessions import EnvironmentSession
from servers.tooling import Tooling, ToolRefusedError, Wait

NEW_EPISODE: Final = "new_episode"
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ActionTooling(Tooling):
    """A tool for each action model, named after it, and one that begins an episode.

    `class Guess(Action)` is the tool `guess`, whose arguments are the action's fields; a result is the observation.
    """

    def __init__(self, factory: Any, action: Any) -> None:
        super().__init__(factory, action)
        self._actions = {_HUMP.sub("_", model.__name__).lower(): model for model in _models_in(action)}
        self._specs = [
            ToolSpec(name=name, description=_describe(model, factory), input_schema=_schema(model))
            for name, model in self._actions.items()
        ]
        options = {key: value for key, value in describe_reset(factory).items() if key != "title"}
        self._specs.append(
            ToolSpec(name=NEW_EPISODE, description="Begin a new episode.", input_schema=options)
        )

    def offers(self, feature: str) -> bool:
        """Return False: actions are the only things offered."""
        return False

    def list_declared(self, method: str) -> Sequence[ToolSpec]:
        """Return a tool for each action, and the one that begins an episode; there is nothing else to list."""
        return self._specs

    def request_call(
        self,
        session: EnvironmentSession,
        name: str,
        arguments: Mapping[str, Any],
        context: ToolContext,
        wait: Wait = None,
    ) -> tuple[Any, Callable[[Any], ToolResult]]:
        """Return the request that takes an action or begins an episode, and what makes a `ToolResult` of its result."""
        if name == NEW_EPISODE:
            return Reset(dict(arguments)), _result_of
        if (model := self._actions.get(name)) is None:
            known = ", ".join([*self._actions, NEW_EPISODE])
            message = f"expected one of the tools {known}, got {name[:200]!r}"
            raise ToolRefusedError(ToolErrorType.TOOL_NOT_FOUND, message)
        try:
            action = TypeAdapter(model).validate_python(dict(arguments))
        except ValidationError as error:
            raise ToolRefusedError(ToolErrorType.INVALID_ARGS, describe_faults(error, "arguments")) from None
        return action, _result_of


def _models_in(action: Any) -> list[type[Action]]:
    """Return the action models of a union, or the one itself."""
    if isinstance(action, type):
        return [action] if issubclass(action, Action) else []
    parts = get_args(action)[:1] if get_origin(action) is Annotated else get_args(action)
    return [model for part in parts for model in _models_in(part)]


def _describe(model: type[BaseModel], factory: Any) -> str:
    """Return the docstring of an action, or else that of the environment."""
    own = model.__doc__ if "__doc__" in vars(model) else None
    return cleandoc(own or factory.__doc__ or model.__name__)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.get("properties", {}).pop("metadata", None)
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def _result_of(observation: Observation) -> ToolResult:
    fields = from_json(encode_model(observation))
    if not fields.get("metadata"):
        fields.pop("metadata", None)
    return ToolResult.of(fields)
