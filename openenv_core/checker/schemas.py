"""Whether what is called a JSON schema is one."""

from typing import TYPE_CHECKING, Any

from openenv_core.checker.needs import needs

if TYPE_CHECKING:
    from jsonschema import SchemaError


def fault_of(schema: Any) -> "SchemaError | None":
    """Return what is wrong with a schema; None where nothing is.

    Raises:
        ConfigurationError: The package that tells is absent.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise needs("jsonschema", error) from error
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as fault:
        return fault
    return None
