"""Keys of the configuration among the words of a command: `a.b=c`, `--a.b c` and `--a.b=c` mean the same."""

import re
from collections.abc import Sequence
from typing import Final

TOP_LEVEL: Final = ("algorithm", "deterministic", "output_dir")
"""Keys without a dot that no command has as an option of its own."""
_KEY: Final = re.compile(
    rf"--(?P<key>{'|'.join(TOP_LEVEL)}|[A-Za-z_]\w*(?:\.\w+)+)(?P<value>=.*)?", re.DOTALL
)


def overrides_first_class(words: Sequence[str]) -> list[str]:
    """The words with every `--a.b c` and `--a.b=c` written as `a.b=c`; the others are as they were.

    An option with a dot is a key, for no option of a command has one, and so are those of `TOP_LEVEL`. A key without a
    value behind it is left without one, for whoever reads overrides to refuse. What begins with two dashes is the next
    option and no value.
    """
    told: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*told, word, *rest]
        found = _KEY.fullmatch(word)
        if found is None:
            told.append(word)
        elif found["value"] is not None:
            told.append(found["key"] + found["value"])
        elif rest and not rest[0].startswith("--"):
            told.append(f"{found['key']}={rest.pop(0)}")
        else:
            told.append(found["key"])
    return told
