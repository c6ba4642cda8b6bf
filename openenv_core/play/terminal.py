"""Where a game is played: a terminal, a pipe, or for a program."""

import os
import sys
from collections.abc import Sequence
from typing import Final, TextIO

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
