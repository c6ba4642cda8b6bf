r"""Numbers as people and models write them, read strictly and exactly; nothing is ever evaluated.

Read are `42`, `-1,234.5`, `.5`, `6.02e23`, `3/4`, `12.5%`, and of LaTeX `\frac{3}{4}`, `1.5 \times 10^{-3}`, `25\%`
and the mathematics around them (`$...$`, `\(...\)`, `\[...\]`). The whole text has to be one number: a unit, a second
number or a word makes it none. `boxed` finds the answer that a text marks with `\boxed{...}`.
"""

import re
from fractions import Fraction
from typing import Final

MAX_CHARS: Final = 400

MAX_BOXES: Final = 100
r"""How many `\boxed{` are looked at, from the end: a text may consist of ones that nobody closes."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"[+-]?\s*"

_PLAIN: Final = re.compile(rf"({_SIGN})({_DECIMAL})(?:[eE]([+-]?\d{{1,4}}))?", re.ASCII)
_TIMES_TEN: Final = re.compile(
    rf"({_SIGN})({_DECIMAL})\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|([+-]?\d{{1,4}}))",
    re.ASCII,
)
_FRACTION: Final = re.compile(
    rf"({_SIGN})(?:({_DECIMAL})\s*/\s*({_DECIMAL})"
    rf"|\\[dt]?frac\s*\{{\s*(-?{_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}})",
    re.ASCII,
)
_PERCENT: Final = re.compile(r"\s*\\?%$")
_AROUND: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BOXED: Final = r"\boxed{"


def parse_number(text: str) -> Fraction | None:
    """Return the number that a text is, exactly; None where it is not one number and nothing else."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    text = _without_mathematics(text.replace("\N{MINUS SIGN}", "-"))
    whole = _PERCENT.sub("", text)
    number = _number(whole)
    if number is None or whole == text:
        return number
    return number / 100


def boxed(text: str) -> str | None:
    r"""Return what is in the last complete `\boxed{...}` of a text; None where none of the last ones is complete."""
    begin = len(text)
    for _ in range(MAX_BOXES):
        begin = text.rfind(_BOXED, 0, begin)
        if begin < 0:
            break
        depth = 1
        for at in range(begin + len(_BOXED), min(len(text), begin + 2 * MAX_CHARS)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[begin + len(_BOXED) : at]
    return None


def close(got: Fraction, expected: Fraction, rel_tol: float, abs_tol: float) -> bool:
    """Say whether a number is within a tolerance of another: the larger of both tolerances holds."""
    return abs(got - expected) <= max(Fraction(abs_tol), Fraction(rel_tol) * abs(expected))


def _without_mathematics(text: str) -> str:
    for opening, closing in _AROUND:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) and inner:
            return inner.strip()
    return text


def _number(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        sign, digits, exponent = match.groups()
        return _signed(sign, _decimal(digits) * _power(exponent))
    if match := _TIMES_TEN.fullmatch(text):
        sign, digits, braced, bare = match.groups()
        return _signed(sign, _decimal(digits) * _power(braced or bare))
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        above, below = (_decimal(part) for part in parts if part is not None)
        return _signed(sign, above / below) if below else None
    return None


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if "-" in sign else number


def _decimal(digits: str) -> Fraction:
    digits = digits.replace(",", "").removesuffix(".")
    return Fraction(f"0{digits}" if digits.startswith(".") else digits)


def _power(exponent: str | None) -> Fraction:
    return Fraction(10) ** int(exponent or 0)
