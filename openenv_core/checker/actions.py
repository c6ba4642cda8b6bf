"""Valid actions for an environment that nothing but its schema is known of."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from openenv_core.checker.check import CheckFailed
from openenv_core.checker.running import needs

Json: TypeAlias = dict[str, Any]

DRAWN: Final = 64
"""How many different actions are drawn from a schema."""

_MODEST: Final[Mapping[str, Json]] = {
    "integer": {"minimum": -1000, "maximum": 1000},
    "number": {"minimum": -1000, "maximum": 1000},
    "string": {"maxLength": 32},
    "array": {"maxItems": 6},
}
"""Bounds for what a schema leaves without: play is to be plausible, and huge values are other checks' to try."""

CHANGE: Final = (
    "list validation.episodes.example_actions in openenv.yaml, or `examples` on the action's fields"
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Actions to choose from.

    Attributes:
        first: Played first, in their order, where they were given by the author.
        choices: What is drawn from afterwards.
    """

    first: tuple[Json, ...]
    choices: tuple[Json, ...]

    def draw(self, source: random.Random) -> Iterator[Json]:
        """Yield actions for ever."""
        yield from (copy.deepcopy(action) for action in self.first)
        while True:
            yield copy.deepcopy(source.choice(self.choices))


def pool(
    schema: Json, given: Sequence[Json], tools: Callable[[], Sequence[Json]], seed: int, count: int = DRAWN
) -> Pool:
    """Return what to play with.

    Args:
        schema: Of the action.
        given: The author's own examples, which go before everything else.
        tools: Asks the environment for its tools, where it is one of tools.
        seed: Decides what is drawn.
        count: How many different actions at most.

    Raises:
        CheckFailed: None can be made.
    """
    if examples := [*given, *(one for one in schema.get("examples", ()) if isinstance(one, Mapping))]:
        return Pool(tuple(dict(one) for one in examples), tuple(dict(one) for one in examples))
    choices = _calls(tools(), seed, count) if is_of_tools(schema) else sample(schema, count, seed)
    if not choices:
        raise CheckFailed("expected at least one action that the schema allows, got none", change=CHANGE)
    return Pool((), tuple(choices))


def is_of_tools(schema: Json) -> bool:
    """Whether the actions are calls of tools."""
    return any(
        {"tool_name", "arguments"} <= set(part.get("properties", ()))
        for part in (schema, *schema.get("$defs", {}).values())
        if isinstance(part, Mapping)
    )


def sample(schema: Json, count: int, seed: int, *, modest: bool = True) -> list[Json]:
    """Draw values that a JSON schema allows, each once; the same ones for the same seed.

    Args:
        schema: What they follow.
        count: How many at most.
        seed: Decides them.
        modest: Keeps numbers, texts and lists small where the schema does not say, and leaves out `metadata`.

    Raises:
        CheckFailed: Nothing follows the schema, or it is none.
        ConfigurationError: The packages for drawing are absent.
    """
    try:
        import hypothesis
        from hypothesis_jsonschema import from_schema
    except ImportError as error:
        raise needs("hypothesis-jsonschema", error) from error
    drawn: dict[str, Json] = {}

    def keep(value: Json) -> None:
        drawn.setdefault(repr(value), value)

    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    try:
        strategy = from_schema(_modest(schema) if modest else schema)
        hypothesis.seed(seed)(settings(hypothesis.given(strategy)(keep)))()
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if not drawn:
            raise CheckFailed(
                f"expected to draw actions from the schema, got {type(error).__name__}: {error}",
                change=CHANGE,
            ) from error
    return list(drawn.values())


def _calls(tools: Sequence[Json], seed: int, count: int) -> list[Json]:
    """Return calls of tools with arguments that their schemas allow."""
    calls: list[Json] = []
    share = max(1, count // max(1, len(tools)))
    for tool in tools:
        arguments = sample(tool.get("input_schema") or tool.get("inputSchema") or {}, share, seed)
        calls += [
            {"type": "call_tool", "tool_name": tool.get("name"), "arguments": given} for given in arguments
        ]
    return calls


def _modest(schema: Any, top: bool = True) -> Any:
    """Return a schema with bounds where it has none, without an action's `metadata`."""
    if isinstance(schema, list):
        return [_modest(part, False) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: value if key in ("enum", "const", "default", "examples") else _modest(value, False)
        for key, value in schema.items()
        if key != "format" or value in ("date", "date-time", "email", "uri", "uuid")
    }
    properties = found.get("properties")
    if isinstance(properties, dict) and "metadata" not in found.get("required", ()):
        found["properties"] = {name: value for name, value in properties.items() if name != "metadata"}
    kind = found.get("type")
    if isinstance(kind, str) and "enum" not in found and "const" not in found:
        for bound, value in _MODEST.get(kind, {}).items():
            _bound(found, bound, value)
    return found


def _bound(schema: Json, name: str, value: int) -> None:
    """Add a bound unless the schema has one, or one that contradicts it."""
    exclusive = f"exclusive{name.capitalize()}"
    if name in schema or exclusive in schema or "pattern" in schema or "multipleOf" in schema:
        return
    if name == "maximum":
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        value = max(value, int(low) + value)
    if name == "minimum":
        high = schema.get("maximum", schema.get("exclusiveMaximum", 0))
        value = min(value, int(high) + value)
    if name in ("maxLength", "maxItems"):
        value = max(value, int(schema.get(name.replace("max", "min"), 0)))
    schema[name] = value
