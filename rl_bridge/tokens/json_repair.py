"""JSON that a small model wrote almost right, mended. Nothing calls this unless a setting says so."""

import re
from typing import Final

_FENCE: Final = "```"
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_WORD: Final = re.compile(r"[A-Za-z_]+")
_CLOSING: Final = {"{": "}", "[": "]"}
_CONTROLS: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def repaired(text: str) -> str:
    """Mend what leaves no doubt; what it returns need not be JSON.

    Code fences around it go. Strings in single quotes get double ones, raw line breaks and tabs in them become escapes,
    Python's True, False and None become JSON's, commas before a closing bracket go, and what is still open at the end
    is closed. Names, numbers and the order of things stay as they are.
    """
    if (fenced := text.strip()).startswith(_FENCE):
        text = fenced.removeprefix(_FENCE).removeprefix("json").removesuffix(_FENCE).strip()
    out: list[str] = []
    open_brackets: list[str] = []
    place = 0
    while place < len(text):
        char = text[place]
        if char in "\"'":
            string, place = _string(text, place)
            out.append(string)
        elif (word := _WORD.match(text, place)) is not None:
            out.append(_PYTHON.get(word[0], word[0]))
            place = word.end()
        else:
            if char in _CLOSING:
                open_brackets.append(_CLOSING[char])
            elif open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                _drop_comma(out)
            out.append(char)
            place += 1
    if open_brackets:
        _drop_comma(out)
    return "".join(out) + "".join(reversed(open_brackets))


def _drop_comma(out: list[str]) -> None:
    while out and out[-1].isspace():
        out.pop()
    if out and out[-1] == ",":
        out.pop()


def _string(text: str, start: int) -> tuple[str, int]:
    """The string that begins at a place, as JSON has it, and where it ends. An open one ends with the text."""
    quote, place, out = text[start], start + 1, ['"']
    while place < len(text) and text[place] != quote:
        char = text[place]
        if char == "\\" and place + 1 < len(text):
            out.append("'" if text[place + 1] == "'" else text[place : place + 2])
            place += 2
            continue
        out.append('\\"' if char == '"' else _CONTROLS.get(char, char))
        place += 1
    return "".join(out) + '"', place + 1
