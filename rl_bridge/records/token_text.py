"""The text of each token of an answer, such that the texts joined are the answer's."""

from collections.abc import Callable, Sequence
from functools import lru_cache

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are not yet, or never, a character."""
REMEMBERED_TOKENS = 65_536
REMEMBERED_TEXTS = 64
"""Siblings are shown the same first prompt."""


class TokenText:
    """Decodes whole stretches of tokens, and answers token by token.

    Args:
        decode: Token ids to text, special tokens included.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._alone = lru_cache(REMEMBERED_TOKENS)(self._decode_one)
        self._whole = lru_cache(REMEMBERED_TEXTS)(decode)

    def _decode_one(self, token: int) -> str:
        return self._decode((token,))

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of a stretch of tokens."""
        return self._whole(tuple(tokens)) if tokens else ""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One text a token, shape [T]. A token that completes no character has an empty one."""
        if not tokens:
            return []
        # What a token is on its own says it for nearly all answers, and is remembered.
        alone = [self._alone(token) for token in tokens]
        if "".join(alone) == self._decode(tokens):
            return alone
        return self._in_context(tokens)

    def _in_context(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text of those before it.

        Only the tokens since the last whole character but one are decoded again: enough for tokenizers that set words
        apart by what stands before them, and linear in the number of tokens.
        """
        pieces: list[str] = []
        begin = read = 0
        before = ""
        for place in range(1, len(tokens) + 1):
            now = self._decode(tokens[begin:place])
            if place < len(tokens) and (len(now) <= len(before) or now.endswith(INCOMPLETE)):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            begin, read = read, place
            before = self._decode(tokens[begin:read])
        return pieces
