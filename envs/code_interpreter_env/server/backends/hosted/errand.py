"""Our own code in a session's interpreter: what is sent, and how its answer is read."""

import base64
import json
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from .errors import Unanswered

MOST_BYTES: Final = 8 << 20
"""The most that may come back: a piece of a file, or a list of many."""


class Errand:
    """One question to `inside.py`.

    The marker around the answer is random, so that nothing that was printed before is taken for it. Code that stays
    in the interpreter can see it and answer in our place; it would answer for its own files only.

    Args:
        verb: A function of `inside.py`.
        asked: Its argument, as JSON.

    Attributes:
        verb: As given.
        expression: A Python expression whose value is the answer, as a text.
    """

    def __init__(self, verb: str, **asked: Any) -> None:
        self.verb = verb
        self._marker = f"<{secrets.token_hex(16)}>"
        packed = base64.b64encode(json.dumps(asked).encode()).decode()
        # No name is left in the code's namespace.
        self.expression = (
            "(lambda names: (__import__('builtins').exec(names.pop('source'), names), "
            f"names['answer']({verb!r}, {packed!r}, {self._marker!r}))[1])"
            f"({{'__name__': 'files_of_a_session', 'source': {_source()!r}}})"
        )

    @property
    def statement(self) -> str:
        """A Python statement that prints the answer."""
        return f"print({self.expression})"

    def read(self, text: str) -> Mapping[str, Any]:
        """Find the answer in what came back.

        Args:
            text: What was printed, or the `repr` of the expression's value: markers and base64 are the same in both.

        Raises:
            Unanswered: There is none.
        """
        # Code may have answered in our place, at any length: nothing is evaluated, and no more than this is read.
        pieces = text.split(self._marker, 3) if len(text) <= MOST_BYTES else []
        if len(pieces) == 3:
            try:
                said = json.loads(base64.b64decode(pieces[1], validate=True))
            except (ValueError, RecursionError):
                said = None
            if isinstance(said, dict):
                return said
        raise Unanswered(
            "expected the interpreter to answer about its files, and it did not: the code in it may have replaced "
            "what that needs; restart it"
        )


@cache
def _source() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
