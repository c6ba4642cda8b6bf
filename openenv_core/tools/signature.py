"""The arguments of a plain typed function: their JSON schema, and the reading of what a caller sends."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.faults import faults_of
from openenv_core.protocol.jsonio import dumps
from openenv_core.tools.context import ToolContext
from openenv_core.tools.docstrings import docstring_of
from openenv_core.tools.errors import InvalidArguments
from openenv_core.tools.results import ToolResult

_FIELD: Final = "argument_"
"""Fields are not called as arguments are: a model has attributes of its own, and refuses some names."""


class _Untitled(GenerateJsonSchema):
    """Leaves out titles that only repeat names: language models pay for each word of a schema."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class Signature:
    """What a function takes from its caller, without what it is given beside that.

    Args:
        function: A method, `self` first, whose parameters have types. One that is annotated with `ToolContext` is
            given the call's context.

    Raises:
        ConfigurationError: A parameter has no type, or one that JSON cannot hold, or is no named one.

    Attributes:
        schema: JSON schema of the arguments, of type object.
        names: Of the arguments.
        required: Of those without a default.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        hints = self._hints()
        described = docstring_of(function).arguments
        fields: dict[str, Any] = {}
        self.required: list[str] = []
        self._context: str | None = None
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise self._refused(parameter.name, "is not a named one")
            if parameter.name not in hints:
                raise self._refused(parameter.name, "has no type")
            hint = hints[parameter.name]
            if inspect.isclass(hint) and issubclass(hint, ToolContext):
                self._context = parameter.name
                continue
            fields[_FIELD + parameter.name] = _field(parameter, hint, described.get(parameter.name))
            if parameter.default is parameter.empty:
                self.required.append(parameter.name)
        self.names = [name.removeprefix(_FIELD) for name in fields]
        try:
            self._model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
            self.schema = self._model.model_json_schema(schema_generator=_Untitled)
        except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
            raise ConfigurationError(
                f"expected parameters of {function.__qualname__} that JSON can hold, got: {error}"
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
            InvalidArguments: They are not what the schema says.
        """
        try:
            read = self._model.model_validate_json(dumps(arguments), strict=strict)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
                for fault in faults_of(error, 0)
            )
            raise InvalidArguments(f"expected arguments as the schema has them, got: {faults}") from None
        found = {name: getattr(read, _FIELD + name) for name in self.names}
        if self._context is not None:
            found[self._context] = context
        return found

    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._function, include_extras=True)
        except NameError as error:
            raise ConfigurationError(
                f"expected types that can be found where {self._function.__qualname__} is defined, got: {error}; "
                "import them at the top of its module, not below TYPE_CHECKING"
            ) from None

    def _refused(self, name: str, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"expected named parameters with types, got {name} of {self._function.__qualname__}, which {why}"
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


def returned_by(function: Callable[..., Any]) -> Returned:
    """Return what a function's annotation promises of its value."""
    hint = get_type_hints(function, include_extras=True).get("return", Any)
    if hint in (Any, object, None, type(None), ToolResult) or _is_content(hint):
        return Returned()
    try:
        schema = TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_Untitled)
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        return Returned()
    if schema.get("type") == "object":
        return Returned(schema, wrapped=False)
    definitions = schema.pop("$defs", None)
    wrapped = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    return Returned(wrapped if definitions is None else {**wrapped, "$defs": definitions}, wrapped=True)


def _is_content(hint: Any) -> bool:
    module = "openenv_core.tools.content"
    return getattr(hint, "__module__", "") == module or any(_is_content(part) for part in get_args(hint))
