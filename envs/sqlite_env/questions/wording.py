"""Phrasings into sentences."""

import re
from collections.abc import Mapping
from typing import Final

from ..world.domain import Domain
from .family import ANY_RULES, VALID_RULES

_WORD: Final = re.compile(r"\{([A-Za-z_]+)\}")


def spoken(phrasing: str, domain: Domain) -> str:
    """Put a domain's words into a phrasing. Slots, in capitals, stay."""
    words = dict(domain.all_words)
    words |= {name.capitalize(): word.capitalize() for name, word in domain.all_words.items()}
    said = _WORD.sub(lambda found: words.get(found[1], found[0]), phrasing)
    return re.sub(r"\b([Aa])n? (?=(\w))", _article, said)


def filled(said: str, slots: Mapping[str, str]) -> str:
    """Put values into the slots."""
    return _WORD.sub(lambda found: slots[found[1]], said)


def rules(domain: Domain, *, valid_only: bool) -> tuple[str, ...]:
    """The sentences that say which events count."""
    return tuple(spoken(rule, domain) for rule in (VALID_RULES if valid_only else ANY_RULES))


def _article(found: re.Match[str]) -> str:
    return f"{found[1]}{'n' if found[2].lower() in 'aeio' else ''} "
