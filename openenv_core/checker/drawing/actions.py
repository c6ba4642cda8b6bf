"""Valid actions for an environment that nothing but its schema is known of."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from openenv_core.checker.drawing.sampling import sample
from openenv_core.checker.outcomes import CheckFailed

Json: TypeAlias = dict[str, Any]

DRAWN: Final = 64
"""How many different actions are drawn from a schema."""

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
