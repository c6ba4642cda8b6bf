"""Observations and results as lines for a person."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

LONGEST: Final = 2_000
"""Characters of one field that are shown; the rest is counted."""

_WIDTH: Final = 100
_FIRST: Final = "text"
_METADATA: Final = "metadata"
_CONTROL: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # moves, colours
    r"|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links, the clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""What a terminal obeys instead of showing it."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def observation_lines(observation: Mapping[str, Any], *, colours: bool = False) -> Iterator[str]:
    """Yield an observation's lines: its `text` as it is, then every other field by its name, metadata not.

    Args:
        observation: The observation's fields.
        colours: Let colours pass. All other control characters are taken out in any case: what an environment
            says must not move the cursor, or set the window's title.
    """
    text = observation.get(_FIRST)
    if isinstance(text, str) and text:
        yield from _cut(harmless(text, colours=colours)).splitlines()
    for name, value in observation.items():
        if name == _METADATA or (name == _FIRST and isinstance(value, str)):
            continue
        shown = harmless(value if isinstance(value, str) else _plain(value), colours=colours)
        lines = _cut(shown).splitlines() or [""]
        if len(lines) == 1:
            yield f"  {harmless(name)}: {lines[0]}"
        else:
            yield f"  {harmless(name)}:"
            yield from (f"    {line}" for line in lines)


def harmless(text: str, *, colours: bool = False) -> str:
    """Return a text without control characters; lines and tabs stay."""

    def instead(found: re.Match[str]) -> str:
        return found[0] if colours and _COLOUR.fullmatch(found[0]) else ""

    return _CONTROL.sub(instead, text.replace("\r\n", "\n").replace("\r", "\n")) + (
        "\x1b[0m" if colours and "\x1b[" in text else ""
    )


def number(value: Any) -> str:
    """Return a reward or a return, without what the binary number adds to it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else json.dumps(value)


def _plain(value: Any) -> str:
    """Return a value as JSON: on one line, or, where that is long, with a line for each of its parts."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= _WIDTH:
        return line
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {json.dumps(part, ensure_ascii=False)}" for name, part in value.items())
    if isinstance(value, list) and any(isinstance(part, list | Mapping | str) for part in value):
        return "\n".join(json.dumps(part, ensure_ascii=False) for part in value)
    return line


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters; --json shows all)"
