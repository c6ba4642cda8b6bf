"""The terminal of a game: its input, and its events as lines for a person or as JSON lines for a program."""

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TextIO

from openenv_core.cli.command import sanitize
from openenv_core.pictures import describe_picture

LONGEST: Final = 2_000
"""Characters shown of one field; of the rest only the count is shown."""

_WIDTH: Final = 100


def observation_lines(observation: Mapping[str, Any], *, colours: bool = False) -> Iterator[str]:
    """Yield an observation's lines: its `text`, then every other field with its name, without metadata.

    Args:
        observation: The observation's fields.
        colours: Whether to keep colours. All other control sequences are removed in any case: an environment's
            output must not move the cursor or set the window's title.
    """
    text = observation.get("text")
    if isinstance(text, str) and text:
        yield from _shorten(sanitize(text, colours=colours)).splitlines()
    for name, value in observation.items():
        if name == "metadata" or (name == "text" and isinstance(value, str)):
            continue
        shown = (describe_picture(value) or value) if isinstance(value, str) else _plain(value)
        cleaned = sanitize(shown, colours=colours)
        lines = _shorten(cleaned).splitlines() or [""]
        if len(lines) == 1:
            yield f"  {sanitize(name)}: {lines[0]}"
        else:
            yield f"  {sanitize(name)}:"
            yield from (f"    {line}" for line in lines)


def format_number(value: Any) -> str:
    """Return a reward or return as text, without the digits of binary rounding."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else json.dumps(value)


def _plain(value: Any) -> str:
    """Return a value as JSON: on one line or, if that is too long, with a line per item."""
    line = as_json(value)
    if len(line) <= _WIDTH:
        return line
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {as_json(item)}" for name, item in value.items())
    if isinstance(value, list) and any(isinstance(item, list | Mapping | str) for item in value):
        return "\n".join(as_json(item) for item in value)
    return line


def _shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters; --json shows all)"


class Terminal:
    """Reads actions from a terminal or a pipe, and reports a game.

    Args:
        source: The input; standard input by default.
        sink: The output; standard output by default.
        is_json: Whether to report one JSON object a line, each with its `event`, and nothing else.
    """

    def __init__(
        self, source: TextIO | None = None, sink: TextIO | None = None, *, is_json: bool = False
    ) -> None:
        self.is_json: Final = is_json
        self._source = source or sys.stdin
        self._sink = sink or sys.stdout
        self.is_interactive: Final = self._source.isatty()
        self.colours: Final = self._sink.isatty() and not os.environ.get("NO_COLOR")
        is_typed = source is None and sink is None and self.is_interactive and self._sink.isatty()
        self._can_edit = is_typed and not is_json
        if self._can_edit:
            with suppress(ImportError):  # where there is none, lines are typed without it
                importlib.import_module("readline")  # lets `input` edit and recall lines

    def say(self, text: str = "") -> None:
        """Print a line for a person."""
        if not self.is_json:
            self._write(f"{text}\n")

    def ask(self, prompt: str) -> str:
        """Return the next line, stripped; EOFError at the end of the input."""
        if self._can_edit:
            return input(prompt).strip()
        if not self.is_json:
            self._write(prompt)
        line = self._source.readline()
        if not line:
            raise EOFError
        if not self.is_interactive:
            self.say(line.rstrip("\r\n"))  # echoed as if it had been typed
        return line.strip()

    def report(self, event: str, lines: Iterable[str], **fields: Any) -> None:
        """Report an event: as lines for a person, or as a JSON object of its name and fields."""
        if self.is_json:
            self._write(json.dumps({"event": event, **fields}) + "\n")
        for line in lines:
            self.say(line)

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()


def as_json(value: Any) -> str:
    """Return a value as JSON, with characters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)
