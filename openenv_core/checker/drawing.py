"""Draws valid actions for an environment from its schema, its examples or its tools."""

import copy
import json
import math
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, TypeAlias
from uuid import UUID

from openenv_core.checker.check import CheckError, import_package
from openenv_core.tools.specs import is_of_tools

Json: TypeAlias = dict[str, Any]

TRIES: Final = 8
"""Draws per requested value. Many schemas allow fewer different values than requested."""

_MAX_DEPTH: Final = 6
"""Depth below which all optional parts are left out."""

_LETTERS: Final = string.ascii_letters + string.digits + " _-.,:;/?!"
_STRANGE: Final = "\x00\n\t\"'\\<>{}%éßΩ漢字🙂\u200b\u202e\ufeff"
_WIDE: Final = (0, 1, -1, 2**31 - 1, -(2**31), 2**53, -(2**53), 2**63 - 1, -(2**63), 10**30)
_STRUCTURE: Final = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum"},
}
"""The keys of a schema that show its type, if it does not say so."""


class _UndrawableError(ValueError):
    """No value can be drawn from a schema."""


def sample(schema: Json, count: int, seed: int | random.Random, *, keep_small: bool = True) -> list[Any]:
    """Draw different values that a JSON schema allows; the same ones for the same seed.

    Args:
        schema: The schema.
        count: Maximum number of values.
        seed: A seed, or a generator to draw from.
        keep_small: Whether to keep numbers, texts and lists small if the schema does not bound them, and to leave out
            `metadata`. Otherwise everything that the schema allows is drawn, often huge and odd values.

    Raises:
        CheckError: No value was drawn that the schema allows, or the schema is invalid.
        ConfigurationError: A package of the `author` extra is not installed.
    """
    jsonschema = import_package("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    sampler = Sampler(schema, seed if isinstance(seed, random.Random) else random.Random(seed), keep_small)
    samples: dict[str, Any] = {}
    reason = "no drawn value follows it"
    for _ in range(count * TRIES):
        try:
            value = sampler.draw()
            if validator.is_valid(value):
                samples.setdefault(json.dumps(value, sort_keys=True), value)
        except Exception as error:  # an invalid schema breaks the validator in many ways
            reason = f"{type(error).__name__}: {error}"
        if len(samples) == count:
            break
    if not samples:
        raise CheckError(
            f"expected to draw values that the schema allows, got none: {reason}",
            change="list validation.episodes.example_actions in openenv.yaml, or `examples` on the model",
        )
    return list(samples.values())


@dataclass
class Sampler:
    """Draws values from one schema; see `sample`."""

    _root: Json
    _source: random.Random
    _keep_small: bool = True

    def draw(self) -> Any:
        """Return a value, which nearly always follows the schema."""
        return self._value(self._root, 0)

    def _value(self, schema: Any, depth: int) -> Any:
        if schema is True or schema == {}:
            return self._draw_anything(depth)
        if not isinstance(schema, Mapping):
            raise _UndrawableError(f"no value follows {schema!r}")
        schema = resolve(schema, self._root)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._source.choice(list(schema["enum"]))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._value(self._draw_alternative(schema, key, depth), depth)
        kind = schema.get("type") or next((k for k, keys in _STRUCTURE.items() if keys & schema.keys()), None)
        if isinstance(kind, list):
            kind = self._source.choice(kind)
        if kind is None:
            return self._draw_anything(depth)
        draw = getattr(self, f"_{kind}", None)
        if draw is None:
            raise _UndrawableError(f"no value is of type {kind!r}")
        return draw(schema, depth)

    def _draw_alternative(self, schema: Json, key: str, depth: int) -> Json:
        arms = list(schema[key])
        simple = [arm for arm in arms if isinstance(arm, Mapping) and arm.get("type") == "null"]
        arm = self._source.choice(simple if depth > _MAX_DEPTH and simple else arms)
        rest = {
            name: value for name, value in schema.items() if name not in (key, "discriminator", "default")
        }
        merged = _merge(rest, arm)
        if tag := (schema.get("discriminator") or {}).get("propertyName"):
            # Without the tag the alternatives cannot be told apart, although each has a default for it.
            merged = _merge(resolve(merged, self._root), {"required": [tag]})
        return merged

    def _draw_anything(self, depth: int) -> Any:
        scalars: list[Any] = [None, True, False, self._source.randint(-9, 9), 0.5, self._text(0, 8)]
        if depth < _MAX_DEPTH and self._source.random() < 0.2:
            return {self._text(1, 6): self._draw_anything(depth + 1)}
        return self._source.choice(scalars)

    def _null(self, _: Json, __: int) -> None:
        return None

    def _boolean(self, _: Json, __: int) -> bool:
        return self._source.random() < 0.5

    def _integer(self, schema: Json, _: int) -> int:
        low, high = _bounds(schema, step=1)
        if not self._keep_small and None in (low, high) and self._source.random() < 0.7:
            extremes = [n for n in _WIDE if (low is None or n >= low) and (high is None or n <= high)]
            if extremes:
                return self._source.choice(extremes)
        least, most = _close_range(low, high, 1000 if self._keep_small else 10**6)
        step = schema.get("multipleOf", 1)
        step = int(step) if isinstance(step, int) and step > 0 else 1
        first, last = -(-math.ceil(least) // step), math.floor(most) // step
        if first > last:
            raise _UndrawableError("no whole number between the bounds")
        if self._keep_small and self._source.random() < 0.5:  # small numbers are meaningful more often
            center = min(max(0, first), last)
            first, last = max(first, center - 10), min(last, center + 10)
        return step * self._source.randint(first, last)

    def _number(self, schema: Json, _: int) -> float:
        low, high = _bounds(schema)
        least, most = _close_range(low, high, 1000 if self._keep_small else 1e300)
        if (step := schema.get("multipleOf")) and isinstance(step, int | float):
            return float(step) * self._source.randint(int(least / step), int(most / step))
        if self._source.random() < 0.2:
            return float(self._source.choice([least, most]))
        return (
            round(self._source.uniform(float(least), float(most)), 3)
            if self._keep_small
            else (least + (most - least) * self._source.random())
        )

    def _string(self, schema: Json, _: int) -> str:
        if (draw := _FORMATS.get(str(schema.get("format")))) is not None:
            return str(draw(self._source))
        if "pattern" in schema:
            return self._source.choice(_match_pattern(str(schema["pattern"])))
        least = int(schema.get("minLength", 0))
        return self._text(least, int(schema.get("maxLength", max(least, 24 if self._keep_small else 400))))

    def _text(self, least: int, most: int) -> str:
        length = self._source.randint(least, max(least, min(most, least + 400)))
        letters = _LETTERS if self._keep_small else _LETTERS + _STRANGE
        return "".join(self._source.choice(letters) for _ in range(length))

    def _array(self, schema: Json, depth: int) -> list[Any]:
        least = int(schema.get("minItems", 0))
        most = int(schema.get("maxItems", max(least, 6)))
        length = least if depth > _MAX_DEPTH else self._source.randint(least, min(most, least + 20))
        first = list(schema.get("prefixItems", ()))
        rest = schema.get("items", {})
        if rest is False:
            length = min(length, len(first))
        items: list[Any] = []
        for index in range(length * 4 if schema.get("uniqueItems") else length):
            value = self._value(first[index] if index < len(first) else rest, depth + 1)
            if not (schema.get("uniqueItems") and value in items):
                items.append(value)
            if len(items) == length:
                break
        return items

    def _object(self, schema: Json, depth: int) -> Json:
        required = set(schema.get("required", ()))
        members: Json = {}
        for name, subschema in schema.get("properties", {}).items():
            if name not in required and (
                depth > _MAX_DEPTH or (self._keep_small and name == "metadata") or self._source.random() < 0.4
            ):
                continue
            members[name] = self._value(subschema, depth + 1)
        for name in sorted(required - members.keys()):
            members[name] = self._draw_anything(depth + 1)
        extra = schema.get("additionalProperties", not schema.get("properties"))
        if (
            extra is not False
            and depth <= _MAX_DEPTH
            and (not schema.get("properties") or not self._keep_small)
        ):
            least = max(0, int(schema.get("minProperties", 0)) - len(members))
            for _ in range(self._source.randint(least, max(least, 2))):
                members[self._text(1, 8)] = self._value(extra, depth + 1)
        return members


def resolve(schema: Mapping[str, Any], root: Json) -> Json:
    """Return a schema with its `$ref`, into the root, and `allOf` merged into it.

    Raises:
        ValueError: No value follows it, its references do not end, or one is to another document.
        KeyError: A reference leads nowhere.
    """
    resolved = dict(schema)
    for _ in range(100):
        parts = resolved.pop("allOf", [])
        if (reference := resolved.pop("$ref", None)) is not None:
            parts = [*parts, _resolve_reference(str(reference), root)]
        if not parts:
            return resolved
        for subschema in parts:
            resolved = _merge(resolved, subschema)
    raise _UndrawableError("its references do not end")


def _resolve_reference(reference: str, root: Json) -> Any:
    if not reference.startswith("#"):
        raise _UndrawableError(f"a reference to another document: {reference}")
    place: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        place = place[key.replace("~1", "/").replace("~0", "~")]
    return place


def _merge(first: Mapping[str, Any], second: Any) -> Json:
    """Return a schema that combines two."""
    if not isinstance(second, Mapping):
        if second is True:
            return dict(first)
        raise _UndrawableError(f"no value follows {second!r}")
    merged = {**second, **first}
    if "properties" in first and "properties" in second:
        merged["properties"] = {**second["properties"], **first["properties"]}
    if "required" in first and "required" in second:
        merged["required"] = [*first["required"], *second["required"]]
    if "type" in second:
        merged["type"] = second["type"]
    return merged


def _bounds(schema: Json, step: int = 0) -> tuple[float | None, float | None]:
    def read_limits(bound: str, exclusive: str, margin: int) -> list[float]:
        limits = ((schema.get(bound), 0), (schema.get(exclusive), margin))
        return [n + more for n, more in limits if isinstance(n, int | float) and not isinstance(n, bool)]

    low, high = (
        read_limits("minimum", "exclusiveMinimum", step),
        read_limits("maximum", "exclusiveMaximum", -step),
    )
    return max(low, default=None), min(high, default=None)


def _close_range(low: float | None, high: float | None, span: float) -> tuple[float, float]:
    """Return both ends of a range, with open ends replaced."""
    if low is None:
        return (-span, span) if high is None else (min(-span, high - span), high)
    return low, max(span, low + span) if high is None else high


def _random_datetime(source: random.Random) -> datetime:
    return datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=source.randrange(10**8))


_FORMATS: Final[Mapping[str, Callable[[random.Random], object]]] = {
    "date-time": lambda source: _random_datetime(source).isoformat(),
    "date": lambda source: _random_datetime(source).date().isoformat(),
    "time": lambda source: _random_datetime(source).time().isoformat(),
    "duration": lambda source: f"PT{source.randrange(1000)}S",
    "uuid": lambda source: UUID(int=source.getrandbits(128), version=4),
    "email": lambda source: f"user{source.randrange(1000)}@example.org",
    "uri": lambda source: f"https://example.org/{source.randrange(1000)}",
    "ipv4": lambda source: f"192.0.2.{source.randrange(256)}",
    "ipv6": lambda source: f"2001:db8::{source.randrange(1, 65536):x}",
    **dict.fromkeys(("base64", "base64url", "binary"), lambda source: "AAEC"[: 4 * source.randrange(2)]),
}


@lru_cache(maxsize=64)
def _match_pattern(pattern: str) -> list[str]:
    hypothesis = import_package("hypothesis")
    samples: list[str] = []
    settings = hypothesis.settings(
        max_examples=16,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    texts = hypothesis.strategies.from_regex(pattern, alphabet=string.printable)

    def add_sample(text: str) -> None:
        samples.append(text)

    hypothesis.seed(0)(settings(hypothesis.given(texts)(add_sample)))()
    # In Python, unlike in JSON schema, `$` also matches before a trailing newline.
    return sorted(text for text in set(samples) if not text.endswith("\n")) or sorted(samples)


@dataclass(frozen=True, slots=True)
class ActionPool:
    """Actions to choose from.

    Attributes:
        choices: The actions.
        in_order: Whether each is played once, in this order, before any is chosen, as for the author's examples.
    """

    choices: tuple[Json, ...]
    in_order: bool = False

    def draw(self, source: random.Random) -> Iterator[Json]:
        """Yield actions for ever."""
        if self.in_order:
            yield from copy.deepcopy(self.choices)
        while True:
            yield copy.deepcopy(source.choice(self.choices))


def pool(
    schema: Json,
    author_examples: Sequence[Json],
    tools: Callable[[], Sequence[Json]],
    seed: int,
    count: int = 64,
) -> ActionPool:
    """Return the actions to play: the examples if there are any, else calls of the tools, else values of the schema."""
    if examples := [
        *author_examples,
        *(example for example in schema.get("examples", ()) if isinstance(example, Mapping)),
    ]:
        return ActionPool(tuple(dict(example) for example in examples), in_order=True)
    choices = _calls(tools(), seed, count) if is_of_tools(schema) else sample(schema, count, seed)
    if not choices:
        raise CheckError(
            "expected at least one action that the schema allows, got none",
            change="list validation.episodes.example_actions in openenv.yaml, or `examples` on the action's fields",
        )
    return ActionPool(tuple(choices))


def _calls(tools: Sequence[Json], seed: int, count: int) -> list[Json]:
    calls: list[Json] = []
    share = max(1, count // max(1, len(tools)))
    for tool in tools:
        arguments = sample(tool.get("input_schema") or tool.get("inputSchema") or {}, share, seed)
        calls += [
            {"type": "call_tool", "tool_name": tool.get("name"), "arguments": arguments_of_call}
            for arguments_of_call in arguments
        ]
    return calls


def require_schema(schema: Any, owner: str, change: str) -> None:
    """Raise `CheckError` unless a schema is a valid JSON schema."""
    jsonschema = import_package("jsonschema")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as fault:
        raise CheckError(
            f"expected a valid JSON schema of {owner}, got an error at {fault.json_path}: {fault.message}",
            change=change,
        ) from fault
