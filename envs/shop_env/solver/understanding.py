"""What customers and policies say, as values."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from ..world.requests import Kind
from ..world.speech import BY_NUMBER, BY_PRODUCT, OF_MINE, PHRASINGS

_SLOT: Final = re.compile(r"\{([A-Z]+)\}")
_OTHER_METHOD: Final = re.compile(r" Please put the money on my \S+, not on what I paid with\.$")


class Puzzled(Exception):  # noqa: N818 - it says what the solver is
    """The solver does not know what it sees."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as it was understood: what was said of it."""

    number: int
    kind: Kind
    order: str | None
    products: tuple[str, ...]
    option: str | None
    code: str | None


def wishes(task: str) -> list[Wish]:
    """Read the requests in a task.

    Raises:
        Puzzled: One is put in a way that is not known.
    """
    return [
        _wish(int(number), said) for number, said in re.findall(r"^Request (\d+): (.+)$", task, re.MULTILINE)
    ]


def policy_numbers(text: str, pattern: str) -> tuple[int, ...]:
    """Return the numbers that a policy has where the pattern has groups.

    Raises:
        Puzzled: The policy is not worded so.
    """
    if (found := re.search(pattern, text)) is None:
        raise Puzzled(f"expected a policy like {pattern!r}, got {text!r}")
    return tuple(int(number) for number in found.groups())


def _wish(number: int, said: str) -> Wish:
    said = _OTHER_METHOD.sub("", said)
    for kind, pattern in _patterns():
        if (found := pattern.fullmatch(said)) is not None:
            return _read(number, kind, found.groupdict())
    raise Puzzled(f"expected a request of a known form, got {said!r}")


def _read(number: int, kind: Kind, slots: Mapping[str, str]) -> Wish:
    order = re.fullmatch(r"order (O\d+)", slots["REF"], re.IGNORECASE)
    by_product = re.fullmatch(r"the order with the (.+)", slots["REF"], re.IGNORECASE)
    products: tuple[str, ...] = tuple(by_product.groups()) if by_product else ()
    if "THINGS" in slots:
        products = tuple(slots["THINGS"].split(" and the "))
    elif "PRODUCT" in slots:
        products = (slots["PRODUCT"],)
    return Wish(
        number, kind, order[1].upper() if order else None, products, slots.get("OPTION"), slots.get("CODE")
    )


@cache
def _patterns() -> tuple[tuple[Kind, "re.Pattern[str]"], ...]:
    refs = "|".join(
        _SLOT.sub(".+?", ref.replace("{ORDER}", "{O}")) for ref in (BY_NUMBER, BY_PRODUCT, OF_MINE)
    )
    found = []
    for kind, phrasings in PHRASINGS.items():
        for phrasing in phrasings:
            parts = _SLOT.split(phrasing)
            said = "".join(
                (f"(?P<{part}>{refs})" if part == "REF" else f"(?P<{part}>.+?)")
                if place % 2
                else re.escape(part)
                for place, part in enumerate(parts)
            )
            # Sentences begin with a capital, which may be that of the order.
            found.append((kind, re.compile(said, re.IGNORECASE)))
    return tuple(found)
