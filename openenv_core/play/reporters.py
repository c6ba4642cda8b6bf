"""Who is told of a game: a person, or a program that reads JSON, one event a line."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from openenv_core.play.form import Json
from openenv_core.play.game import Result, Summary

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
        yield from _shorten(harmless(text, colours=colours)).splitlines()
    for name, value in observation.items():
        if name == _METADATA or (name == _FIRST and isinstance(value, str)):
            continue
        shown = harmless(value if isinstance(value, str) else _plain(value), colours=colours)
        lines = _shorten(shown).splitlines() or [""]
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


def _shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text) - LONGEST} more characters; --json shows all)"


_BOLD: Final = "1"
_DIM: Final = "2"


class Terminal:
    """Asks and tells.

    Args:
        source: Where answers come from; standard input by default.
        sink: Where everything is told; standard output by default.
        quiet: Tell nothing but what is emitted: the sink is for a program.
    """

    def __init__(
        self, source: TextIO | None = None, sink: TextIO | None = None, *, quiet: bool = False
    ) -> None:
        self._source = source or sys.stdin
        self._sink = sink or sys.stdout
        self.for_programs: Final = quiet
        self.attended: Final = self._source.isatty()
        self.colours: Final = self._sink.isatty() and not os.environ.get("NO_COLOR")
        self._completer: _Completer | None = None

    def say(self, text: str = "") -> None:
        """Tell a line."""
        if not self.for_programs:
            self.emit(text)

    def emit(self, text: str) -> None:
        """Tell a line, also where the sink is for a program."""
        self._sink.write(f"{text}\n")
        self._sink.flush()

    def strong(self, text: str) -> str:
        """Return a text that stands out, where that can be."""
        return self._styled(_BOLD, text)

    def faint(self, text: str) -> str:
        """Return a text that stands back, where that can be."""
        return self._styled(_DIM, text)

    def ask(self, prompt: str, choices: Sequence[str] = ()) -> str:
        """Return the next line, without blanks around it.

        Args:
            prompt: Is shown before it.
            choices: Are offered where the terminal completes words.

        Raises:
            EOFError: There is none.
        """
        if self._edited():
            assert self._completer is not None
            self._completer.choices = choices
            return input(prompt).strip()
        if not self.for_programs:
            self._sink.write(prompt)
            self._sink.flush()
        line = self._source.readline()
        if not line:
            raise EOFError
        if not self.attended:
            self.say(line.rstrip("\r\n"))  # as it would stand there had it been typed
        return line.strip()

    def _styled(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours and text else text

    def _edited(self) -> bool:
        """Whether lines can be edited, recalled and completed."""
        if self.for_programs or self._source is not sys.stdin or self._sink is not sys.stdout:
            return False
        if not (self.attended and self._sink.isatty()):
            return False
        if self._completer is None:
            self._completer = _Completer()
        return self._completer.installed


class _Completer:
    """Completes words at a prompt."""

    def __init__(self) -> None:
        self.choices: Sequence[str] = ()
        self.installed = False
        try:
            import readline
        except ImportError:  # an interpreter without it
            return
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind(
            "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
        )
        self.installed = True

    def _complete(self, text: str, index: int) -> str | None:
        found = [choice for choice in self.choices if choice.startswith(text)]
        return found[index] if index < len(found) else None


class ForPeople:
    """Tells in lines that are read."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def began(self, episode: int, options: Json, result: Result) -> None:
        """Tell of a reset."""
        given = ", ".join(
            f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()
        )
        self._terminal.say(self._terminal.strong(f"--- episode {episode}" + (f", {given}" if given else "")))
        self._observation(result)

    def stepped(self, step: int, action: Json, result: Result, total: float) -> None:
        """Tell of a step."""
        self._observation(result)
        figures = f"step {step}   reward {number(result.reward)}   return {number(total)}"
        self._terminal.say(self._terminal.faint(figures + ("   done" if result.done else "")))

    def ended(self, summary: Summary) -> None:
        """Tell what an episode came to."""
        steps = f"{summary.steps} step" + ("" if summary.steps == 1 else "s")
        became = "is over" if summary.done else "was left"
        total = number(summary.total)
        self._terminal.say(
            self._terminal.strong(f"episode {summary.episode} {became} after {steps}: return {total}")
        )

    def failed(self, error: Exception) -> None:
        """Tell what went wrong."""
        self._terminal.say(f"{type(error).__name__}: {harmless(str(error))}")

    def told(self, name: str, value: Any) -> None:
        """Tell what was asked for."""
        self._terminal.say(harmless(json.dumps(value, ensure_ascii=False, indent=2)))

    def _observation(self, result: Result) -> None:
        for line in observation_lines(result.observation, colours=self._terminal.colours):
            self._terminal.say(line)
        if metadata := result.metadata or result.observation.get("metadata"):
            text = harmless(json.dumps(metadata, ensure_ascii=False))
            self._terminal.say(self._terminal.faint(f"  metadata: {text}"))


class ForPrograms:
    """Tells in JSON: one object a line, each with its `event`."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def began(self, episode: int, options: Json, result: Result) -> None:
        """Tell of a reset."""
        self._event("reset", episode=episode, options=options, **_fields_of(result))

    def stepped(self, step: int, action: Json, result: Result, total: float) -> None:
        """Tell of a step."""
        self._event("step", step=step, action=action, **_fields_of(result), **{"return": total})

    def ended(self, summary: Summary) -> None:
        """Tell what an episode came to."""
        figures = {"episode": summary.episode, "steps": summary.steps, "return": summary.total}
        self._event("episode", **figures, done=summary.done)

    def failed(self, error: Exception) -> None:
        """Tell what went wrong."""
        self._event("error", type=type(error).__name__, message=str(error))

    def told(self, name: str, value: Any) -> None:
        """Tell what was asked for."""
        self._event(name, **{name: value})

    def _event(self, event: str, **fields: Any) -> None:
        self._terminal.emit(json.dumps({"event": event, **fields}))


def _fields_of(result: Result) -> Json:
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "metadata": result.metadata,
    }
