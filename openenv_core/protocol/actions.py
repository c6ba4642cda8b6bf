"""What a step may carry, where the model that a server was given does not say all of it."""

from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import BaseModel, PlainValidator, ValidatorFunctionWrapHandler, WrapValidator

from openenv_core.tools.wire import CallToolAction, ListToolsAction
from openenv_core.types import Action

_OF_TOOLS: Final = (Action, CallToolAction, ListToolsAction)


def readable(action_type: Any) -> Any:
    """Return what reads the actions of a server.

    A server that was given one of the actions of tools, or the base of all, takes both actions of tools: released
    folders name one of them and mean both. A model with a `model_validate` of its own is read by that.
    """
    if any(action_type is one for one in _OF_TOOLS):
        return Annotated[action_type, WrapValidator(_either)]
    if isinstance(action_type, type) and issubclass(action_type, BaseModel) and _reads_itself(action_type):
        return Annotated[Any, PlainValidator(action_type.model_validate)]
    return action_type


def _either(value: Any, own: ValidatorFunctionWrapHandler) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    of_tools: dict[Any, Callable[[Any], Any]] = {
        "list_tools": ListToolsAction.model_validate,
        "call_tool": CallToolAction.model_validate,
    }
    return of_tools.get(kind, own)(value)


def _reads_itself(model: type[BaseModel]) -> bool:
    return getattr(model.model_validate, "__func__", None) is not getattr(
        BaseModel.model_validate, "__func__", None
    )
