"""Python values as bounded, tagged JSON, for the arguments and results of functions called in the sandbox.

The same file runs on both sides, so it needs only the standard library. Outside, `loads` reads data that code may have
forged: it limits size and depth, builds builtin types only, and never runs the sender's code. Inside, `dumps` reads
values that code has made: it checks `type(x) is ...` and never calls a method of a subclass, so an object that lies
about its type is refused.

None, booleans, 64-bit integers, finite floats, strings, lists, and dicts with string keys map to plain JSON. Other
values are an object with one key that begins with "$":

    {"$tuple": [1, 2]}          {"$set": [1, 2]}          {"$frozenset": [1, 2]}
    {"$int": "-1f...hex"}       {"$float": "nan"}         {"$complex": [0.0, 1.0]}
    {"$bytes": "base64"}        {"$dict": [[1, "one"]]}   for keys that are not strings, or would read as a tag

Any other value (an instance of a class, a generator, a numpy scalar) is refused with its type's name. A Counter,
defaultdict or OrderedDict arrives as a dict. Two references to one list arrive as two lists.
"""

import binascii
import json
import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import repeat
from operator import is_
from typing import Any, Final

MAX_DEPTH: Final = 64
MAX_BYTES: Final = 4 << 20

_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 63) - 1

# Compared by identity: hashing or comparing a class would run methods of its metaclass.
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = ((tuple, "$tuple"), (set, "$set"), (frozenset, "$frozenset"))

_HEXADECIMAL: Final = frozenset("-0123456789abcdef")

_ITEM_COST: Final = 2
"""Characters that an item adds to the JSON of its content, at least."""

# More equal hashes than this are not chance, and a set of such items takes quadratic time to build.
_MAX_SAME_HASH: Final = 50


class NotPlainError(ValueError):
    """A value cannot be passed: its type is not supported, it is too deep or too large, or its JSON is invalid."""


def dumps(value: Any, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> bytes:
    """Return a value as tagged JSON.

    Raises:
        NotPlainError: It contains a value of an unsupported type, or is too deep or too large.
    """
    plain = encode(value, max_bytes=max_bytes, max_depth=max_depth)
    data = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > max_bytes:
        raise _too_big(max_bytes)
    return data


def loads(data: bytes, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Decode a value from tagged JSON, which may be untrusted.

    Raises:
        NotPlainError: It is too large, too deep, not JSON, or has an invalid tag.
    """
    if len(data) > max_bytes:
        raise _too_big(max_bytes)
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise NotPlainError(f"expected JSON, got: {type(error).__name__}") from None
    return decode(plain, max_depth=max_depth)


def encode(value: Any, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return a value as an object that `json.dumps` can write and `decode` can read.

    Args:
        value: The value.
        max_bytes: Approximate limit of the JSON's size; `dumps` enforces it exactly.
        max_depth: Maximum nesting of containers.

    Raises:
        NotPlainError: It contains a value of an unsupported type, or is too deep or too large.
    """
    encoder = _Encoder(max_bytes)
    try:
        return encoder.encode(value, max_depth)
    except RuntimeError as error:  # another thread changed a dict meanwhile, or the stack was nearly full
        raise NotPlainError(f"expected a value that does not change, got: {type(error).__name__}") from None


def decode(plain: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """Decode a value from parsed tagged JSON.

    Raises:
        NotPlainError: It is too deep, or has an invalid tag.
    """
    kind = type(plain)
    if kind is list:
        if max_depth <= 0:
            raise _too_deep()
        return [decode(item, max_depth=max_depth - 1) for item in plain]
    if kind is dict:
        if len(plain) == 1:
            ((tag, content),) = plain.items()
            if tag[:1] == "$":
                return _untag(tag, content, max_depth)
        if max_depth <= 0:
            raise _too_deep()
        return {key: decode(item, max_depth=max_depth - 1) for key, item in plain.items()}
    if plain is None or kind is str or kind is int or kind is float or kind is bool:
        return plain
    raise NotPlainError(f"expected parsed JSON, got {type_name(kind)}")


def type_name(kind: type) -> str:
    """Return a class's own name, even if its metaclass overrides `__name__`."""
    name: str = type.__dict__["__name__"].__get__(kind)
    return name


class _Encoder:
    """Encodes one value within a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._limit = budget

    def encode(self, value: Any, depth: int) -> Any:
        self._pay(_ITEM_COST)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            self._pay(value.bit_length() // 4)
            return value if _INT_MIN <= value <= _INT_MAX else {"$int": format(value, "x")}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is str:
            self._pay(len(value))
            return value
        if kind is bytes:
            self._pay(len(value))
            return {"$bytes": b64encode(value).decode("ascii")}
        if kind is complex:
            return {"$complex": [self.encode(value.real, depth), self.encode(value.imag, depth)]}
        if kind is list:
            return self._items(value, depth)
        for sequence, tag in _SEQUENCES:
            if kind is sequence:
                return {tag: self._items(value, depth)}
        for mapping in _DICTS:
            if kind is mapping:
                return self._dict(value, depth)
        raise NotPlainError(
            "expected None, a bool, int, float, complex, str, bytes, list, tuple, set, frozenset or dict, "
            f"got an instance of {type_name(kind)!r}"
        )

    def _items(self, value: Collection[Any], depth: int) -> list[Any]:
        if depth <= 0:
            raise _too_deep()
        # Large values are usually long flat lists; this checks them at the speed of C.
        kind = type(next(iter(value), None))
        if kind is str and _all_are(str, value):
            self._pay(_ITEM_COST * len(value) + sum(map(len, value)))
            return list(value)
        is_float = kind is float and _all_are(float, value) and all(map(math.isfinite, value))
        is_int = kind is int and _all_are(int, value) and min(value) >= _INT_MIN and max(value) <= _INT_MAX
        if is_float or is_int:
            self._pay(_ITEM_COST * len(value))
            return list(value)
        return [self.encode(item, depth - 1) for item in value]

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        if depth <= 0:
            raise _too_deep()
        # Called on `dict`, because code can replace the methods of Counter.
        keys, items = dict.keys(value), dict.items(value)
        if _all_are(str, keys) and (len(keys) != 1 or not next(iter(keys)).startswith("$")):
            self._pay(_ITEM_COST * len(keys) + sum(map(len, keys)))
            return {key: self.encode(item, depth - 1) for key, item in items}
        return {"$dict": [[self.encode(key, depth - 1), self.encode(item, depth - 1)] for key, item in items]}

    def _pay(self, cost: int) -> None:
        self._budget -= cost
        if self._budget < 0:
            raise _too_big(self._limit)


def _all_are(kind: type, values: Iterable[Any]) -> bool:
    return all(map(is_, map(type, values), repeat(kind)))


def _untag(tag: str, content: Any, depth: int) -> Any:
    reader = _READERS.get(tag)
    if reader is None:
        raise NotPlainError(f"expected a known tag, got {tag[:20]!r}")
    try:
        return reader(content, depth)
    except NotPlainError:
        raise
    except (TypeError, ValueError, binascii.Error):
        raise NotPlainError(f"expected valid content of {tag}, got something else") from None


def _sequence(content: Any, depth: int) -> list[Any]:
    items: list[Any] = decode(_list(content), max_depth=depth)
    return items


def _hashable(content: Any, depth: int) -> list[Any]:
    items = _sequence(content, depth)
    _check_spread(items)
    return items


def _mapping(content: Any, depth: int) -> dict[Any, Any]:
    if depth <= 0:
        raise _too_deep()
    pairs = _sequence(content, depth + 1)  # a pair is no container of its own
    _check_spread([key for key, _ in map(_list, pairs)])
    return dict(pairs)


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise TypeError
    return content


def _integer(content: Any, depth: int) -> int:
    if type(content) is not str or not _HEXADECIMAL.issuperset(content):
        raise TypeError
    return int(content, 16)


def _special_float(content: Any, depth: int) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise TypeError
    return float(content)


def _complex(content: Any, depth: int) -> complex:
    real, imag = _sequence(content, 1)
    if type(real) is not float or type(imag) is not float:
        raise TypeError
    return complex(real, imag)


def _check_spread(items: list[Any]) -> None:
    # Hashes of numbers are not salted, so the sender could choose numbers with equal hashes.
    if len(items) <= _MAX_SAME_HASH:
        return
    hashes = sorted(map(hash, items))
    if any(first == last for first, last in zip(hashes, hashes[_MAX_SAME_HASH:], strict=False)):
        raise NotPlainError("expected a set or dict whose keys differ, got too many with one hash")


_READERS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "$tuple": lambda content, depth: tuple(_sequence(content, depth)),
    "$set": lambda content, depth: set(_hashable(content, depth)),
    "$frozenset": lambda content, depth: frozenset(_hashable(content, depth)),
    "$dict": _mapping,
    "$int": _integer,
    "$float": _special_float,
    "$complex": _complex,
    "$bytes": lambda content, depth: b64decode(content, validate=True),
}


def _too_big(limit: int) -> NotPlainError:
    return NotPlainError(f"the value takes more than {limit} bytes as JSON")


def _too_deep() -> NotPlainError:
    return NotPlainError("expected a value that is nested less deep, and not within itself")
