"""What a Google docstring says: what a function is for, and what its arguments are."""

import inspect
import re
from dataclasses import dataclass, field
from typing import Final

_SECTION: Final = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Attributes):\s*")
_ARGUMENT: Final = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring, taken apart.

    Attributes:
        description: Everything before the first section.
        arguments: What each argument is.
    """

    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str) -> Docstring:
    """Take the docstring of a function apart."""
    lines = inspect.cleandoc(text).splitlines()
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in lines:
        if (found := _SECTION.fullmatch(line)) is not None:
            current = found[1]
            sections.setdefault(current, [])
        else:
            sections[current].append(line)
    described = sections.get("Args", []) + sections.get("Arguments", [])
    return Docstring("\n".join(sections[""]).strip(), _arguments(described))


def _arguments(lines: list[str]) -> dict[str, str]:
    filled = [line for line in lines if line.strip()]
    if not filled:
        return {}
    indent = min(len(line) - len(line.lstrip()) for line in filled)
    found: dict[str, str] = {}
    name = None
    for line in filled:
        text = line.strip()
        begins = _ARGUMENT.fullmatch(text) if len(line) - len(line.lstrip()) == indent else None
        if begins is not None:
            name = begins[1]
            found[name] = begins[2]
        elif name is not None:
            found[name] = f"{found[name]} {text}".strip()
    return found
