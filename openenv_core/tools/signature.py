"""The arguments of a plain typed function: their JSON schema, and the reading of what a caller sends."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.errors import faults_of, short
from openenv_core.protocol.jsonio import dumps
from openenv_core.tools.context import ToolContext
from openenv_core.tools.declare import Method
from openenv_core.tools.results import ToolResult
from openenv_core.tools.wire import InvalidArgumentsError

_FIELD: Final = "argument_"
"""Fields are not called as arguments are: a model has attributes of its own, and refuses some names."""

_MAX_FAULTS_CHARS: Final = 4000
"""Of what is wrong with a call, which a policy reads."""

# Bytes are base64 in arguments as they are in results.
_CONFIG: Final = ConfigDict(extra="forbid", val_json_bytes="base64", ser_json_bytes="base64")


class _Schema(GenerateJsonSchema):
    """Leaves out titles that only repeat names: language models pay for each word of a schema.

    A default that JSON cannot hold is left out too; the argument may be all the same.
    """

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as its base has it

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def float_schema(self, schema: Any) -> Any:
        """What is no number becomes null in a result; MCP clients hold that against the schema."""
        told = super().float_schema(schema)
        if self.mode == "serialization" and schema.get("allow_inf_nan", True):
            return {**told, "type": ["number", "null"]}
        return told


class Signature:
    """What a function takes from its caller, without what it is given beside that.

    Args:
        method: One whose parameters have types. Those that are annotated with `ToolContext` are given the call's
            context.

    Raises:
        ConfigurationError: A parameter has no type, or one that JSON cannot hold, or is no named one, or its default
            is a `Field`.

    Attributes:
        schema: JSON schema of the arguments, of type object.
        names: Of the arguments.
        required: Of those without a default.
    """

    def __init__(self, method: Method) -> None:
        fields: dict[str, Any] = {}
        self.required: list[str] = []
        self._contexts: list[str] = []
        for parameter in method.parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise _refused(method, parameter.name, "is not a named one")
            if parameter.name not in method.hints:
                raise _refused(method, parameter.name, "has no type")
            if isinstance(parameter.default, FieldInfo):
                why = "has a Field as its default: write Annotated[type, Field(...)] = default"
                raise _refused(method, parameter.name, why)
            hint = method.hints[parameter.name]
            if inspect.isclass(hint) and issubclass(hint, ToolContext):
                self._contexts.append(parameter.name)
                continue
            described = method.docstring.arguments.get(parameter.name)
            fields[_FIELD + parameter.name] = _field(parameter, hint, described)
            if parameter.default is parameter.empty:
                self.required.append(parameter.name)
        self.names = [name.removeprefix(_FIELD) for name in fields]
        try:
            self._model = create_model(method.attribute, __config__=_CONFIG, **fields)
            self.schema = self._model.model_json_schema(schema_generator=_Schema)
        except (PydanticUserError, TypeError) as error:  # TypeError: bounds of what cannot have any
            raise ConfigurationError(
                f"expected parameters of {method.name} that JSON can hold, got: {error}"
            ) from None
        self.schema.pop("title", None)
        self.schema.setdefault("properties", {})
        # The model's docstring is that of its base, and nobody's description.
        self.schema.pop("description", None)

    def read(
        self, arguments: Mapping[str, Any], context: ToolContext, *, strict: bool = True
    ) -> dict[str, Any]:
        """Return what to call the function with.

        Args:
            arguments: As JSON has them.
            context: The call's.
            strict: A number is no text and the reverse. Prompts and addresses have texts alone, so they are lenient.

        Raises:
            InvalidArgumentsError: They are not what the schema says.
        """
        try:
            text = dumps(arguments)
        except PydanticSerializationError as error:  # lone surrogates, or deeper than anybody reads
            raise InvalidArgumentsError(f"expected arguments that JSON can hold, got: {error}") from None
        try:
            read = self._model.model_validate_json(text, strict=strict)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
                for fault in faults_of(error, len(text))
            )
            told = short(faults, _MAX_FAULTS_CHARS)
            raise InvalidArgumentsError(f"expected arguments as the schema has them, got: {told}") from None
        found = {name: getattr(read, _FIELD + name) for name in self.names}
        for name in self._contexts:
            found[name] = context
        return found


def _refused(method: Method, name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"expected named parameters with types, got {name} of {method.name}, which {why}"
    )


def _field(parameter: inspect.Parameter, hint: Any, described: str | None) -> tuple[Any, Any]:
    options: dict[str, Any] = {"alias": parameter.name}
    if described and not _describes(hint):
        options["description"] = described
    if parameter.default is not parameter.empty:
        options["default"] = parameter.default
    return hint, Field(**options)


def _describes(hint: Any) -> bool:
    if get_origin(hint) is not Annotated:
        return False
    return any(isinstance(extra, FieldInfo) and extra.description for extra in get_args(hint)[1:])


@dataclass(frozen=True, slots=True)
class Returned:
    """What a function promises to return.

    Attributes:
        schema: JSON schema of the structured result, of type object; None where nothing is promised.
        wrapped: The value is below a key `result` of it.
    """

    schema: dict[str, Any] | None = None
    wrapped: bool | None = None


def returned_by(method: Method) -> Returned:
    """Return what a method's annotation promises of its value."""
    hint = method.hints.get("return", Any)
    if hint in (Any, object, None, type(None), ToolResult) or _is_content(hint):
        return Returned()
    try:
        schema = TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_Schema)
    except (PydanticUserError, TypeError):
        return Returned()
    if schema.get("type") == "object":
        return Returned(schema, wrapped=False)
    definitions = schema.pop("$defs", None)
    # A model that holds others of its kind is told by reference.
    itself = (definitions or {}).get(schema.get("$ref", "").rpartition("/")[2], {})
    if itself.get("type") == "object":
        return Returned({**itself, "$defs": definitions}, wrapped=False)
    wrapped = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    return Returned(wrapped if definitions is None else {**wrapped, "$defs": definitions}, wrapped=True)


def _is_content(hint: Any) -> bool:
    module = "openenv_core.tools.results"
    return getattr(hint, "__module__", "") == module or any(_is_content(part) for part in get_args(hint))
