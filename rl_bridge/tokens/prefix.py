"""The prompts of one chat, each of which continues the one before it, without a copy for each."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import SupportsIndex, overload


class Prefix(Sequence[int]):
    """The first tokens of a list that only grows.

    The prompts of an episode share one list in memory, and where they travel together they do so once: of 32 turns
    that fill a context of 4096 tokens that is a sixteenth.

    Args:
        tokens: The list. Whoever has it may append to it, and nothing else.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: SupportsIndex | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            if step == 1:
                return self._tokens[start:stop]
            return [self._tokens[place] for place in range(start, stop, step)]
        return self._tokens[range(self._length)[at]]

    def continues(self, before: Sequence[int]) -> bool:
        """Whether a sequence is known to be how this one begins, as the two share their list. Nothing is compared."""
        return (
            isinstance(before, Prefix) and before._tokens is self._tokens and before._length <= self._length
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __repr__(self) -> str:
        return f"Prefix({list(self)})"
