"""A task for a language model, written from the models of an environment in one file."""

import inspect
import json
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from openenv_core.errors import ConfigurationError
from openenv_core.lifecycle import models_of
from openenv_core.one_file import import_file, read_file
from openenv_core.scaffold.names import EnvironmentNames
from openenv_core.types import Action, Observation

_TEMPLATE: Final = Path(__file__).parent / "templates" / "task_of_models.txt"


def task_text(names: EnvironmentNames, path: Path, name: str) -> str:
    """Return the text of a task for the environment in a file.

    Args:
        names: The names of the environment.
        path: The file.
        name: The environment's class.

    Raises:
        ConfigurationError: There is no such environment, or its models are no plain classes.
        Exception: Raised by the file's own code.
    """
    if not path.is_file() or name not in read_file(path).classes:
        raise ConfigurationError(
            f"there is no environment in {path}; make one with: ropewalk init {names.short}"
        )
    models = models_of(cls := getattr(import_file(path), name))
    for model, base in ((models.action, Action), (models.observation, Observation)):
        if not (isinstance(model, type) and issubclass(model, base)):
            raise ConfigurationError(
                f"expected one model of each in {name}, got {model!r}; docs/tutorials/train.md shows how a task is "
                "written"
            )
    fields = [field for field in models.observation.model_fields if field not in Observation.model_fields]
    lines = "\\n".join(f"{field}: {{observation.{field}}}" for field in fields)
    return _TEMPLATE.read_text(encoding="utf-8").format(
        title=names.title,
        module=path.stem,
        imported=", ".join(sorted({models.action.__name__, models.observation.__name__})),
        action=models.action.__name__,
        observation=models.observation.__name__,
        prefix=names.prefix,
        rules=f"{inspect.cleandoc(cls.__doc__ or names.title)}\n{describe_answer(models.action)}".replace(
            '"""', "'"
        ),
        shown=f'f"{lines}"' if fields else '""',
    )


def only_field(action: Any) -> str | None:
    """Return the name of an action's field if it has one beside its metadata."""
    names = [name for name in getattr(action, "model_fields", ()) if name != "metadata"]
    return names[0] if len(names) == 1 else None


def describe_answer(action: Any) -> str:
    """Return a sentence that asks for an action, with its schema: JSON, or the value of the only field."""
    schema: dict[str, Any] = TypeAdapter(action).json_schema()
    schema.pop("title", None)
    properties = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    for field in properties.values():
        field.pop("title", None)
    if (field := only_field(action)) is not None:
        return f"Answer with {field} and nothing else: {json.dumps(properties[field], ensure_ascii=False)}"
    shown = schema | ({"properties": properties} if properties else {})
    return f"Answer with JSON of this schema and nothing else: {json.dumps(shown, ensure_ascii=False)}"
