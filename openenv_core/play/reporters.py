"""Reporters of a game: for a person in a terminal, or for a program as JSON lines."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO, TypeAlias

from openenv_core.cli.command import sanitize
from openenv_core.play.form import Json
from openenv_core.types import StepResult

Result: TypeAlias = StepResult[Json]

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
        cleaned = sanitize(value if isinstance(value, str) else _plain(value), colours=colours)
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
    line = _json(value)
    if len(line) <= _WIDTH:
        return line
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_json(item)}" for name, item in value.items())
    if isinstance(value, list) and any(isinstance(item, list | Mapping | str) for item in value):
        return "\n".join(_json(item) for item in value)
    return line


def _shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters; --json shows all)"


BOLD: Final = "1"
DIM: Final = "2"


class Terminal:
    """Reads actions from a terminal or a pipe, and reports a game as readable lines."""

    is_json = False

    def __init__(self, source: TextIO | None = None, sink: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        self._sink = sink or sys.stdout
        self.is_interactive: Final = self._source.isatty()
        self.colours: Final = self._sink.isatty() and not os.environ.get("NO_COLOR")
        self._choices: Sequence[str] = ()
        self._can_edit = self._install_editing()

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line for a person."""
        self._write(f"\x1b[{style}m{text}\x1b[0m\n" if style and text and self.colours else f"{text}\n")

    def ask(self, prompt: str, choices: Sequence[str] = ()) -> str:
        """Return the next line, stripped; EOFError at the end of the input."""
        if self._can_edit:
            self._choices = choices
            return input(prompt).strip()
        if not self.is_json:
            self._write(prompt)
        line = self._source.readline()
        if not line:
            raise EOFError
        if not self.is_interactive:
            self.say(line.rstrip("\r\n"))  # echoed as if it had been typed
        return line.strip()

    def show_reset(self, episode: int, options: Json, result: Result) -> None:
        """Report a reset."""
        option_text = "".join(f", {name} {_json(value)}" for name, value in options.items())
        self.say(f"--- episode {episode}{option_text}", BOLD)
        self._observation(result)

    def show_step(self, step: int, action: Json, result: Result, total: float | None) -> None:
        """Report a step."""
        self._observation(result)
        line = f"step {step}   reward {format_number(result.reward)}   return {format_number(total)}"
        self.say(line + ("   done" if result.done else ""), DIM)

    def show_end(self, episode: int, steps: int, total: float | None, done: bool) -> None:
        """Report the end of an episode; one that is not done was abandoned."""
        duration = f"{steps} step" + ("" if steps == 1 else "s")
        outcome = "is over" if done else "was left"
        self.say(f"episode {episode} {outcome} after {duration}: return {format_number(total)}", BOLD)

    def show_failure(self, error: Exception) -> None:
        """Report a refused action or another error after which the game continues."""
        self.say(f"{type(error).__name__}: {sanitize(str(error))}")

    def show_answer(self, name: str, value: Any, lines: Sequence[str] | None = None) -> None:
        """Print a requested state, schema or list of tools."""
        for line in lines or [sanitize(json.dumps(value, ensure_ascii=False, indent=2))]:
            self.say(line)

    def _observation(self, result: Result) -> None:
        for line in observation_lines(result.observation, colours=self.colours):
            self.say(line)
        if metadata := result.metadata or result.observation.get("metadata"):
            self.say(f"  metadata: {sanitize(_json(metadata))}", DIM)

    def _write(self, text: str) -> None:
        self._sink.write(text)
        self._sink.flush()

    def _install_editing(self) -> bool:
        """Let lines be edited, recalled and completed, if they are typed; return whether they can be."""
        is_typed = self.is_interactive and self._source is sys.stdin
        if self.is_json or not is_typed or self._sink is not sys.stdout or not self._sink.isatty():
            return False
        try:
            import readline
        except ImportError:  # this interpreter has no readline
            return False
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind(
            "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
        )
        return True

    def _complete(self, text: str, index: int) -> str | None:
        matching = [choice for choice in self._choices if choice.startswith(text)]
        return matching[index] if index < len(matching) else None


class JsonTerminal(Terminal):
    """Reports as JSON: one object per line, each with its `event`."""

    is_json = True

    def say(self, text: str = "", style: str = "") -> None:
        """Print nothing: the output is for a program."""

    def show_reset(self, episode: int, options: Json, result: Result) -> None:
        """Report a reset."""
        self._event("reset", episode=episode, options=options, **_fields_of(result))

    def show_step(self, step: int, action: Json, result: Result, total: float | None) -> None:
        """Report a step."""
        self._event("step", step=step, action=action, **_fields_of(result), **{"return": total})

    def show_end(self, episode: int, steps: int, total: float | None, done: bool) -> None:
        """Report the end of an episode."""
        self._event("episode", episode=episode, steps=steps, **{"return": total}, done=done)

    def show_failure(self, error: Exception) -> None:
        """Report an error."""
        self._event("error", type=type(error).__name__, message=str(error))

    def show_answer(self, name: str, value: Any, lines: Sequence[str] | None = None) -> None:
        """Report a requested state, schema or list of tools."""
        self._event(name, **{name: value})

    def _event(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, **fields}) + "\n")


def _fields_of(result: Result) -> Json:
    return {name: getattr(result, name) for name in ("observation", "reward", "done", "metadata")}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
