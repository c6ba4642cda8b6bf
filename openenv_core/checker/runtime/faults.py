"""Values that are held against their schema."""

from dataclasses import dataclass
from typing import Any

from openenv_core.checker.needs import needs


@dataclass(frozen=True, slots=True)
class Fault:
    """Where a value does not follow its schema.

    Attributes:
        place: As `$.field[0]`.
        value: What stands there.
        message: What is wrong with it.
    """

    place: str
    value: Any
    message: str


def first_fault(schema: dict[str, Any], value: Any) -> Fault | None:
    """Return where a value does not follow a schema; None where it does.

    Raises:
        ConfigurationError: The package that validates is absent.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise needs("jsonschema", error) from error
    found = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    return None if found is None else Fault(found.json_path, found.instance, found.message[:300])
