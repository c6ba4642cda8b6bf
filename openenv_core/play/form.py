"""Forms of actions, read from their JSON schema, and the parser of text typed into their fields."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from openenv_core.checker.drawing import resolve
from openenv_core.tools.specs import CALL_FIELDS

Json: TypeAlias = dict[str, Any]

ABSENT: Final = object()
"""Marks a field without a default."""

_NOT_PROMPTED: Final = frozenset({"metadata"})
"""Fields of every action that none needs; a user can set them by giving the whole action as JSON."""

_FOLLOWED: Final = 16
"""Limit of consecutive references, since a schema may refer to itself."""

_ARTICLES: Final = {"object": "JSON object", "array": "list", "any": "JSON"}


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of an action.

    Attributes:
        name: Its key.
        kind: `integer`, `number`, `string`, `boolean`, `array`, `object`, or `any`.
        choices: Its possible values, if the schema lists them.
        required: Whether it is required.
        nullable: Whether it can be null.
        default: Its default; ABSENT if it has none.
        description: The author's description.
        schema: Its schema, without the null alternative.
        item: The kind of a list's items.
    """

    name: str
    kind: str
    choices: tuple[Any, ...] = ()
    required: bool = False
    nullable: bool = False
    default: Any = ABSENT
    description: str = ""
    schema: Json = field(default_factory=dict)
    item: str = "any"

    @property
    def label(self) -> str:
        """A short description of valid input."""
        if self.choices:
            return "|".join(as_text(choice) for choice in self.choices)
        name = f"list of {self.item}s" if self.kind == "array" and self.item != "any" else self.kind
        if self.kind == "object" and (parts := self.schema.get("properties")):
            name = f"JSON object of {', '.join(parts)}"
        low, high = self.schema.get("minimum"), self.schema.get("maximum")
        ends = ("" if end is None else str(end) for end in (low, high))
        bounds = "" if low is None and high is None else f" {'..'.join(ends)}"
        return _ARTICLES.get(name, name) + bounds + (" or null" if self.nullable else "")


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one kind of action; `fixed` holds the fields with a single possible value."""

    title: str
    fields: tuple[FormField, ...]
    fixed: Json
    description: str = ""

    @property
    def calls_tools(self) -> bool:
        """Whether the action calls a tool by its name."""
        return {field.name for field in self.fields} >= CALL_FIELDS

    @property
    def lists_tools(self) -> bool:
        """Whether the action lists the tools."""
        return self.fixed.get("type") == "list_tools"


def forms_of(schema: Mapping[str, Any]) -> tuple[Form, ...]:
    """Return a form for each kind of action that a schema allows, several if it is a union."""
    root = dict(schema)
    return tuple(_form(arm, root) for arm in _arms(_resolve(root, root), root))


def as_text(value: Any) -> str:
    """Return a value as a user would type it: non-empty text unchanged, anything else as JSON."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _form(schema: Json, root: Json) -> Form:
    required = schema.get("required", ())
    fields, fixed = [], {}
    for name, subschema in (schema.get("properties") or {}).items():
        if name in _NOT_PROMPTED and name not in required:
            continue
        field = _field(name, subschema, root, name in required)
        if len(field.choices) == 1 and not field.nullable:
            fixed[name] = field.choices[0]
        else:
            fields.append(field)
    return Form(str(schema.get("title", "action")), tuple(fields), fixed, str(schema.get("description", "")))


def _field(name: str, subschema: Any, root: Json, required: bool) -> FormField:
    schema = _resolve(subschema, root)
    arms = list(_arms(schema, root))
    non_null = [arm for arm in arms if arm.get("type") != "null"]
    nullable = len(non_null) < len(arms)
    source = schema
    if len(non_null) == 1:
        schema = non_null[0]
    choices = _choices(non_null)
    kinds = {_kind(arm) for arm in non_null}
    item = _resolve(schema.get("items"), root)
    return FormField(
        name=name,
        kind=kinds.pop() if len(kinds) == 1 else "any",
        choices=choices,
        required=required,
        nullable=nullable or (isinstance(schema.get("type"), list) and "null" in schema["type"]),
        default=source.get("default", schema.get("default", ABSENT)),
        description=str(source.get("description", schema.get("description", ""))),
        schema=schema,
        item=_kind(item),
    )


def _arms(schema: Json, root: Json, depth: int = 0) -> Iterator[Json]:
    arms = schema.get("oneOf") or schema.get("anyOf")
    if not isinstance(arms, list) or depth > _FOLLOWED:
        yield schema
        return
    for arm in arms:
        yield from _arms(_resolve(arm, root), root, depth + 1)


def _choices(arms: list[Json]) -> tuple[Any, ...]:
    choices: list[Any] = []
    for arm in arms:
        if "const" in arm:
            choices.append(arm["const"])
        elif isinstance(arm.get("enum"), list):
            choices += arm["enum"]
        elif arm.get("type") == "boolean":
            choices += [True, False]
        else:
            return ()
    return tuple(choices)


def _kind(schema: Json) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [name for name in kind if name != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    return kind if isinstance(kind, str) else "any"


def _resolve(schema: Any, root: Json) -> Json:
    """Return a schema with its references resolved; {} for none, and for one that has no values."""
    try:
        return resolve(schema, root) if isinstance(schema, Mapping) else {}
    except (LookupError, TypeError, ValueError):
        return {}


_SCALARS: Final[Mapping[str, tuple[TypeAdapter[Any], str]]] = {
    "integer": (TypeAdapter(int), "a whole number"),
    "number": (TypeAdapter(FiniteFloat), "a number that JSON can carry"),
    "boolean": (TypeAdapter(bool), "true or false"),
}


def value_of(field: FormField, text: str) -> Any:
    """Parse a text as the value of a field, whose bounds the server checks.

    Raises:
        ValueError: It is not a valid value of the field; the message says what is.
    """
    text = text.strip()
    if field.choices:
        return _choice(field, text)
    if field.nullable and text == "null":
        return None
    return _read(field.kind, field.item, text)


def _read(kind: str, item: str, text: str) -> Any:
    if kind in _SCALARS:
        adapter, expected = _SCALARS[kind]
        try:
            return adapter.validate_strings(text)
        except ValidationError:
            raise ValueError(f"expected {expected}, got {text!r}") from None
    if kind == "string" and not (len(text) > 1 and text[0] == text[-1] == '"'):
        return text
    if kind == "array" and not text.startswith("["):
        return [_read(item, "any", piece) for piece in re.split(r"[,\s]+", text) if piece]
    # Text in double quotes is parsed as JSON, so that it can be empty or have several lines.
    expected, type_ = {"object": ("a JSON object", dict), "array": ("a JSON list", list)}.get(
        kind, ("", object)
    )
    try:
        value = json.loads(text)
    except ValueError as error:
        if not expected:
            return text
        raise ValueError(f"expected {expected}, got {text!r}: {error}") from None
    if not isinstance(value, type_):
        raise ValueError(f"expected {expected}, got {text!r}")
    return value


def _choice(field: FormField, text: str) -> Any:
    if field.nullable and text == "null":
        return None
    if field.kind == "boolean":
        return _read("boolean", "any", text)
    choice_text = text.strip("\"'").lower()
    texts = [as_text(choice) for choice in field.choices]
    for matches in (
        [at for at, name in enumerate(texts) if name == text.strip("\"'")],
        [at for at, name in enumerate(texts) if name.lower() == choice_text],
        [at for at, name in enumerate(texts) if choice_text and name.lower().startswith(choice_text)],
    ):
        if len(matches) == 1:
            return field.choices[matches[0]]
    if field.schema and re.fullmatch(r"-?\d+", text):
        return int(text)  # the server may take numbers for names, as BlackJack does; it refuses others
    raise ValueError(f"expected one of {', '.join(texts)}, got {text!r}")
