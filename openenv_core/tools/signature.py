"""The signature of a tool: JSON schemas of its arguments and result, from types and docstring."""

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError

from openenv_core.errors import ConfigurationError
from openenv_core.protocol.errors import faults_of, short
from openenv_core.protocol.jsonio import dumps
from openenv_core.tools.context import ToolContext
from openenv_core.tools.declare import function_of
from openenv_core.tools.results import ToolResult
from openenv_core.tools.wire import InvalidArgumentsError

_SECTION: Final = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Attributes):\s*")
_ARGUMENT: Final = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before the first section, and the description of each argument."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(text).splitlines():
        if (match := _SECTION.fullmatch(line)) is not None:
            current = match[1]
        else:
            sections.setdefault(current, []).append(line)
    lines = [line for name in ("Args", "Arguments") for line in sections.get(name, []) if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    arguments: dict[str, str] = {}
    name = None
    for line in lines:
        begins = _ARGUMENT.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if begins is not None:
            name = begins[1]
            arguments[name] = begins[2]
        elif name is not None:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(sections[""]).strip(), arguments


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        reason = f"{error}; import them at the top of its module, not below TYPE_CHECKING"
    except Exception as error:  # a quoted annotation can fail in any way
        reason = f"{type(error).__name__}: {error}"
    raise ConfigurationError(f"expected types that can be found where {name} is defined, got: {reason}")


_FIELD: Final = "argument_"
"""Prefix of the model's fields, because models reject some names and have attributes of their own."""

_MAX_FAULTS_CHARS: Final = 4000
"""Maximum length of the errors of a call, which a policy reads."""

# Bytes are base64 in arguments as they are in results.
_CONFIG: Final = ConfigDict(extra="forbid", val_json_bytes="base64", ser_json_bytes="base64")


class _Schema(GenerateJsonSchema):
    """Omits titles that only repeat names, because language models pay for each token of a schema.

    A default that JSON cannot hold is omitted too; the argument stays optional.
    """

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as its base has it

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def float_schema(self, schema: Any) -> Any:
        """Allow null for floats in results: NaN and infinities are sent as null, and MCP clients validate results."""
        json_schema = super().float_schema(schema)
        if self.mode == "serialization" and schema.get("allow_inf_nan", True):
            return {**json_schema, "type": ["number", "null"]}
        return json_schema


class Method:
    """A declared method, and the arguments that its callers pass, without injected parameters.

    Args:
        owner: The class.
        attribute: The method's name in it. Its parameters have types; those annotated with `ToolContext` get the
            context of the call.

    Raises:
        ConfigurationError: It is not a method, or a type cannot be resolved. Or a parameter is untyped, variadic or
            positional-only, has a type that JSON cannot hold, or a `Field` as its default.

    Attributes:
        name: Its name in error messages.
        description: Description from its docstring, or from that of the method it overrides.
        asynchronous: Whether it returns an awaitable.
        returned: Type of its (awaited) value.
        schema: JSON schema of the arguments, of type object.
        names: Names of the arguments.
        required: Names of the arguments without a default.
    """

    def __init__(self, owner: type, attribute: str) -> None:
        attribute_value = inspect.getattr_static(owner, attribute)
        function = function_of(attribute_value)
        self.attribute = attribute
        self.name = getattr(function, "__qualname__", f"{owner.__qualname__}.{attribute}")
        if not callable(function):
            raise ConfigurationError(
                f"expected a method {self.name}, as a base class declares it, got {type(function).__name__}; None "
                "takes the declaration back"
            )
        hints = _hints(function, self.name)
        self.returned = hints.get("return", Any)
        awaited = get_args(self.returned) if get_origin(self.returned) in (Awaitable, Coroutine) else ()
        if awaited:
            self.returned = awaited[-1]
        # A decorator's wrapper may be a plain function that returns the awaitable.
        self.asynchronous = bool(awaited) or inspect.iscoroutinefunction(inspect.unwrap(function))
        # The docstring of the nearest override that has one.
        functions = [function_of(vars(cls)[attribute]) for cls in owner.__mro__ if attribute in vars(cls)]
        docstrings = (getattr(candidate, "__doc__", None) for candidate in functions if callable(candidate))
        self.description, descriptions = _read_docstring(next(filter(None, docstrings), ""))
        parameters = list(inspect.signature(function).parameters.values())
        if not isinstance(attribute_value, staticmethod):
            del parameters[:1]  # self or cls
        self._read_parameters(parameters, hints, descriptions)

    def _read_parameters(
        self, parameters: Sequence[inspect.Parameter], hints: dict[str, Any], descriptions: dict[str, str]
    ) -> None:
        fields: dict[str, Any] = {}
        self.required: list[str] = []
        self._contexts: list[str] = []
        for parameter in parameters:
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise self._refuse(name, "is not a named one")
            if name not in hints:
                raise self._refuse(name, "has no type")
            if isinstance(parameter.default, FieldInfo):
                raise self._refuse(
                    name, "has a Field as its default: write Annotated[type, Field(...)] = default"
                )
            if inspect.isclass(hints[name]) and issubclass(hints[name], ToolContext):
                self._contexts.append(name)
                continue
            is_required = parameter.default is parameter.empty
            fields[_FIELD + name] = hints[name], Field(... if is_required else parameter.default, alias=name)
            if is_required:
                self.required.append(name)
        self.names = [name.removeprefix(_FIELD) for name in fields]
        try:
            self._model = create_model(self.attribute, __config__=_CONFIG, **fields)
            self.schema = self._model.model_json_schema(schema_generator=_Schema)
        except (PydanticUserError, TypeError) as error:  # TypeError: unsupported constraints
            raise ConfigurationError(
                f"expected JSON to hold the parameters of {self.name}: {error}"
            ) from None
        self.schema.pop("title", None)
        for name, property_schema in self.schema.setdefault("properties", {}).items():
            if descriptions.get(name):
                property_schema.setdefault("description", descriptions[name])
        # The docstring of the model's base class does not describe the method.
        self.schema.pop("description", None)

    def _refuse(self, name: str, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"expected named parameters with types, got {name} of {self.name}, which {reason}"
        )

    def read(
        self, arguments: Mapping[str, Any], context: ToolContext, *, strict: bool = True
    ) -> dict[str, Any]:
        """Validate arguments and return the method's keyword arguments.

        Args:
            arguments: The arguments as JSON values.
            context: Context of the call.
            strict: Whether to reject conversions between text and numbers. False for prompts and URIs, whose values
                are always text.

        Raises:
            InvalidArgumentsError: The arguments do not match the schema.
        """
        try:
            text = dumps(arguments)
        except PydanticSerializationError as error:  # lone surrogates, or nested too deeply
            raise InvalidArgumentsError(f"expected arguments that JSON can hold, got: {error}") from None
        try:
            read = self._model.model_validate_json(text, strict=strict)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(key) for key in fault['loc']) or 'arguments'}: {fault['msg']}"
                for fault in faults_of(error, len(text))
            )
            summary = short(faults, _MAX_FAULTS_CHARS)
            raise InvalidArgumentsError(
                f"expected arguments as the schema has them, got: {summary}"
            ) from None
        values = {name: getattr(read, _FIELD + name) for name in self.names}
        return values | dict.fromkeys(self._contexts, context)


def returned_schema(hint: Any) -> tuple[dict[str, Any] | None, bool | None]:
    """Return the schema of a method's result, from the type of its value.

    Returns:
        JSON schema of the structured result, of type object, and whether the value is under its key `result`; None for
        both if the annotation says nothing.
    """
    if hint in (Any, object, None, type(None), ToolResult) or _is_content(hint):
        return None, None
    try:
        schema = TypeAdapter(hint).json_schema(mode="serialization", schema_generator=_Schema)
    except (PydanticUserError, TypeError):
        return None, None
    if schema.get("type") == "object":
        return schema, False
    definitions = schema.pop("$defs", None)
    # A recursive model's schema is a reference.
    referenced = (definitions or {}).get(schema.get("$ref", "").rpartition("/")[2], {})
    if referenced.get("type") == "object":
        return {**referenced, "$defs": definitions}, False
    wrapped = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    return wrapped if definitions is None else {**wrapped, "$defs": definitions}, True


def _is_content(hint: Any) -> bool:
    module = "openenv_core.tools.results"
    return getattr(hint, "__module__", "") == module or any(
        _is_content(argument) for argument in get_args(hint)
    )
