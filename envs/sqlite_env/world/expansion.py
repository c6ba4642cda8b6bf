"""How long a query is once each WITH is written out where it is used: SQLite writes it out before it runs anything.

Ten lines of WITH that use each other several times are a million lines, and no limit of SQLite's ends that.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from ..errors import QueryRefused

MAX_TOKENS: Final = 40_000
"""Words and marks of a query that is written out."""

MAX_DEFINITIONS: Final = 50

# As SQLite has it: whatever is not ASCII is of a name, blanks too.
_TOKEN: Final = re.compile(
    r"""[ \t\n\v\f\r]+|--[^\n]*|/\*.*?(?:\*/|\Z)          # nothing
    |(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])
    |(?P<plain>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*|\d[\w.]*|.)""",
    re.DOTALL | re.VERBOSE,
)
_BEFORE_A_TABLE: Final = frozenset(("from", "join", "in", ",", "("))


def check_expansion(sql: str) -> None:
    """Refuse a query that is too long once it is written out.

    Raises:
        QueryRefused: It is too long, or has too many parts. What is no table is sometimes taken for one, so the
            bounds are far beyond what anybody needs.
    """
    tokens = list(_tokens(sql))
    bodies: dict[str, list[str]] = {}
    for count, (name, start, end) in enumerate(_definitions(tokens), 1):
        bodies.setdefault(name, []).extend(tokens[start:end])
        if count > MAX_DEFINITIONS:
            raise QueryRefused(f"expected a query of at most {MAX_DEFINITIONS} parts (x AS (...)), got more")
    lengths: dict[str, int] = {}
    if bodies and _length(tokens, bodies, lengths) > MAX_TOKENS:
        raise QueryRefused(
            f"expected a query of at most {MAX_TOKENS} words with every WITH written out where it is used, got "
            "a longer one; use each of them less often"
        )


def _length(tokens: Sequence[str], bodies: dict[str, list[str]], lengths: dict[str, int]) -> int:
    total = len(tokens)
    for name in _tables(tokens):
        if name not in bodies:
            continue
        if name not in lengths:
            lengths[name] = 0  # what uses itself is refused elsewhere
            lengths[name] = _length(bodies[name], bodies, lengths)
        total += lengths[name]
        if total > MAX_TOKENS:
            break
    return total


def _tables(tokens: Sequence[str]) -> Iterator[str]:
    for at, token in enumerate(tokens):
        if at and tokens[at - 1] in _BEFORE_A_TABLE and tokens[at + 1 : at + 2] != ["."]:
            yield token


def _definitions(tokens: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Find `name [(columns)] AS [[NOT] MATERIALIZED] (body)`: the name, and where the body is."""
    ends = _ends(tokens)
    starts = {end: start for start, end in ends.items()}
    for at, token in enumerate(tokens):
        if token != "as" or not at:
            continue
        body = at + 1
        while tokens[body : body + 1] in (["not"], ["materialized"]):
            body += 1
        if body in ends:
            name = starts.get(at - 1, at) - 1
            if name >= 0:
                yield tokens[name], body, ends[body]


def _ends(tokens: Sequence[str]) -> dict[int, int]:
    """Return for each opening bracket where it is closed; at the end of all where it is not."""
    ends: dict[int, int] = {}
    there_are: list[int] = []
    for at, token in enumerate(tokens):
        if token == "(":
            there_are.append(at)
        elif token == ")" and there_are:
            ends[there_are.pop()] = at
    return ends | dict.fromkeys(there_are, len(tokens))


def _tokens(sql: str) -> Iterator[str]:
    for found in _TOKEN.finditer(sql):
        if quoted := found["quoted"]:
            # SQLite takes quotes of any kind around a name.
            mark = "]" if quoted[0] == "[" else quoted[0]
            yield quoted[1:-1].replace(mark * 2, mark).lower()
        elif plain := found["plain"]:
            yield plain.lower()
