"""Parsing tool calls in a policy's answers, in the styles of checkpoints, and repairing almost valid JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NoReturn

_FENCE: Final = "```"
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_WORD: Final = re.compile(r"[A-Za-z_]+")
_CLOSING_BRACKETS: Final = {"{": "}", "[": "]"}
_CONTROLS: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def repair_json(text: str) -> str:
    """Repair unambiguous faults in JSON; the result need not be valid.

    Surrounding code fences are removed. Single-quoted strings become double-quoted, raw line breaks and tabs in strings
    become escapes, Python's True, False and None become JSON's, commas before a closing bracket are removed, and what
    is still open at the end is closed. Names, numbers and order stay as they are.
    """
    if (fenced := text.strip()).startswith(_FENCE):
        text = fenced.removeprefix(_FENCE).removeprefix("json").removesuffix(_FENCE).strip()
    out: list[str] = []
    open_brackets: list[str] = []
    index = 0
    while index < len(text):
        char = text[index]
        if char in "\"'":
            string, index = _repair_string(text, index)
            out.append(string)
        elif (word := _WORD.match(text, index)) is not None:
            out.append(_PYTHON.get(word[0], word[0]))
            index = word.end()
        else:
            if char in _CLOSING_BRACKETS:
                open_brackets.append(_CLOSING_BRACKETS[char])
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                _drop_comma(out)
            out.append(char)
            index += 1
    if open_brackets:
        _drop_comma(out)
    return "".join(out) + "".join(reversed(open_brackets))


def _drop_comma(out: list[str]) -> None:
    while out and out[-1].isspace():
        out.pop()
    if out and out[-1] == ",":
        out.pop()


def _repair_string(text: str, start: int) -> tuple[str, int]:
    """Return the string that begins at `start` as JSON, and where it ends; an unclosed one ends with the text."""
    quote, index, out = text[start], start + 1, ['"']
    while index < len(text) and text[index] != quote:
        char = text[index]
        if char == "\\" and index + 1 < len(text):
            out.append("'" if text[index + 1] == "'" else text[index : index + 2])
            index += 2
            continue
        out.append('\\"' if char == '"' else _CONTROLS.get(char, char))
        index += 1
    return "".join(out) + '"', index + 1


OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MAX_DEPTH = 64
THOUGHT, THOUGHT_END = "<think>", "</think>"
XML_MARK = "<function="
"""The mark of checkpoints that write XML between Hermes' marks: Qwen3-Coder, Qwen3.5 and later, Nemotron 3."""
OTHER_MARK = "<arg_key>"
"""The mark of checkpoints that write neither JSON nor that XML between Hermes' marks: GLM-4.5."""
_FUNCTION: Final = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class CallStyle(StrEnum):
    """How a policy writes a call."""

    HERMES = "hermes"
    LLAMA = "llama"
    XML = "xml"


@dataclass(slots=True, frozen=True)
class ToolCall:
    """One tool call. Only the environment knows whether a tool of that name exists."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class UnparsableCall:
    """Text that begins like a call but cannot be parsed as one."""

    reason: str


def style_of_template(template: str) -> CallStyle | None:
    """Return the style that a chat template tells its checkpoint to write calls in; None if it names no known one."""
    if OTHER_MARK in template:
        return None
    if OPEN in template:
        return CallStyle.XML if XML_MARK in template else CallStyle.HERMES
    of_llama = PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    return CallStyle.LLAMA if of_llama else None


def parse_tool_calls(
    text: str,
    *,
    style: CallStyle,
    functions: Sequence[Mapping[str, Any]] = (),
    repair: bool = False,
    in_thought: bool = False,
) -> list[ToolCall] | UnparsableCall:
    """Parse the calls in an answer, in order; if one cannot be parsed, the whole answer is unparsable.

    Thoughts (before `</think>`) are not part of the answer. Arguments that could not be sent to an environment make a
    call unparsable (lone surrogates, infinite numbers, nesting deeper than `MAX_DEPTH`), and so do duplicate keys.

    Args:
        text: The answer, special tokens included, without the token that ended it.
        style: How calls are written.
        functions: The tools that the policy was told of; in XML only their schemas tell a number from its digits.
        repair: Repair almost valid JSON; see `repair_json`. Otherwise it has to conform to RFC 8259.
        in_thought: Whether the prompt opened a thought, as some templates do, which the text continues.

    Returns:
        The calls, empty if there are none, or why they cannot be parsed.
    """
    thought, closing, after = text.partition(THOUGHT_END)
    if not closing and (in_thought or thought.lstrip().startswith(THOUGHT)):
        return []  # the thought never ended, so there is no answer
    answer = after if closing else text
    try:
        if style is CallStyle.HERMES:
            return [
                _make_call(_load_json(block, repair), "arguments") for block in _find_blocks(answer, repair)
            ]
        if style is CallStyle.XML:
            return [_parse_xml(block, functions) for block in _find_blocks(answer, repair)]
        return _parse_llama(answer.strip(), repair)
    except (ValueError, RecursionError) as error:
        return UnparsableCall(str(error) or type(error).__name__)


def _find_blocks(answer: str, repair: bool) -> list[str]:
    before, *blocks = answer.split(OPEN)
    if CLOSE in before:
        raise ValueError(f"expected {OPEN} before {CLOSE}, got none")
    contents = []
    for block in blocks:
        inside, closing, after = block.partition(CLOSE)
        if not closing and not repair:
            raise ValueError(f"expected {CLOSE} after {OPEN}, got none")
        if CLOSE in after:
            raise ValueError(f"expected {OPEN} before {CLOSE}, got none")
        contents.append(inside)
    return contents


def _parse_xml(block: str, functions: Sequence[Mapping[str, Any]]) -> ToolCall:
    if (function := _FUNCTION.fullmatch(block)) is None:
        raise ValueError(f"expected <function=NAME> … </function>, got {block!r:.80}")
    name, rest = function[1], function[2]
    schema = next(
        (tool["function"].get("parameters") or {} for tool in functions if tool["function"]["name"] == name),
        {},
    )
    properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
    arguments: list[tuple[str, Any]] = []
    end = 0
    while (parameter := _PARAMETER.match(rest, end)) is not None:
        types = _find_types(properties.get(parameter[1], {}), definitions)
        arguments.append((parameter[1], _read_value(parameter[2], types)))
        end = parameter.end()
    if rest[end:].strip():
        raise ValueError(f"expected <parameter=NAME> … </parameter>, got {rest[end:]!r:.80}")
    return _make_call({"name": name, "arguments": _require_unique_keys(arguments)}, "arguments")


def _find_types(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    if "$ref" in schema:
        # Definitions are not followed any further: one that refers to others would be an object, which says so.
        return _find_types(definitions.get(str(schema["$ref"]).rpartition("/")[2]), {})
    types = schema.get("type", [])
    choices = [choice for key in ("anyOf", "oneOf") for choice in schema.get(key, ())]
    return (
        {types}
        if isinstance(types, str)
        else set(types).union(*(_find_types(choice, definitions) for choice in choices))
    )


def _read_value(text: str, types: Collection[str]) -> Any:
    """Return the value of a parameter: JSON, or Python's True, False and None; text if it may be a string."""
    if not types or types == {"string"}:
        return text
    try:
        value = json.loads(_PYTHON.get(text.strip(), text), **_STRICT)
    except ValueError as error:
        if "string" in types:
            return text
        raise ValueError(
            f"expected JSON of type {' or '.join(sorted(types))}, got {text!r:.80}: {error}"
        ) from None
    return text if "string" in types and _JSON_TYPES[type(value)].isdisjoint(types) else value


def _parse_llama(answer: str, repair: bool) -> list[ToolCall]:
    rest = answer.removeprefix(PYTHON_TAG).strip()
    if not rest.startswith("{") and rest == answer:
        return []
    calls = []
    while True:
        value, rest = _parse_first_object(rest, repair)
        calls.append(_make_call(value, "parameters"))
        if not rest:
            return calls
        if not rest.startswith(";"):
            raise ValueError(f"expected only ';' and another call after a call, got {rest!r:.80}")
        rest = rest[1:].lstrip()


def _parse_first_object(text: str, repair: bool) -> tuple[Any, str]:
    """Return the JSON value that a text begins with, and the rest; if it has to be repaired, all text is the value."""
    try:
        value, end = json.JSONDecoder(**_STRICT).raw_decode(text)
    except ValueError:
        return _load_json(text, repair), ""
    return value, text[end:].lstrip()


def _make_call(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f'expected an object with a "name", got {json.dumps(value):.80}')
    arguments = value.get(key)
    if not isinstance(arguments, dict):
        raise ValueError(f'expected an object as "{key}" of {value["name"]}, got {json.dumps(arguments):.80}')
    _require_sendable([value["name"], arguments], MAX_DEPTH)
    return ToolCall(value["name"], arguments)


def _require_sendable(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"expected arguments nested at most {MAX_DEPTH} deep, got deeper ones")
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises a UnicodeEncodeError, which is a ValueError
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    elif isinstance(value, list | dict):
        for item in value:
            _require_sendable(item, depth - 1)
        for item in value.values() if isinstance(value, dict) else ():
            _require_sendable(item, depth - 1)


def _load_json(text: str, repair: bool) -> Any:
    text = text.strip()
    try:
        return json.loads(repair_json(text) if repair else text, **_STRICT)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got {text!r:.80}: {error}") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"expected a number that JSON has, got {constant}")


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object's mapping; ValueError if a key is there twice, as the intended value is unclear."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        duplicate = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"expected each name once in an object, got {duplicate!r} twice")
    return mapping


_JSON_TYPES: Final[dict[type, frozenset[str]]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
    str: frozenset(),  # where a string is allowed, quotes are a part of it
}
_STRICT: Final[dict[str, Any]] = {
    "parse_constant": _refuse_constant,
    "object_pairs_hook": _require_unique_keys,
}
