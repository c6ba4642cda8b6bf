"""An application's models, as checks look at them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel

from openenv_core.checker.check import NotApplicable
from openenv_core.checker.subject import Subject
from openenv_core.types import Action, Observation, State

BASES: Final[Mapping[str, type[BaseModel]]] = {
    "action": Action,
    "observation": Observation,
    "reset_observation": Observation,
    "state": State,
}
"""What each model of an application is derived from."""


def classes(subject: Subject) -> Iterator[tuple[str, type[Any]]]:
    """Yield the key in /schema and the class of every model, those of a union one by one.

    Raises:
        NotApplicable: There is no code to look into.
    """
    seen: set[type[Any]] = set()
    for key, model in subject.app.served.models.items():
        for one in arms(model):
            if one not in seen:
                seen.add(one)
                yield key, one


def arms(model: Any) -> list[Any]:
    """Return the classes of a union; of a class, itself."""
    if isinstance(model, type):
        return [model]
    if get_origin(model) is Annotated:
        return arms(get_args(model)[0])
    found = [one for part in get_args(model) for one in arms(part)]
    if not found:
        raise NotApplicable(f"a model of a kind that is not known here: {model!r}")
    return found


def name(model: type[Any]) -> str:
    """Return how a message calls a class."""
    return getattr(model, "__qualname__", repr(model))
