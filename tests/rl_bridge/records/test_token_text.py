"""The text of each token, for tokenizers that make it hard, and for real ones."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_bridge.records import TokenDecoder
from rl_bridge.tokens.chat import ChatTokenizer
from tests.rl_bridge.records.records_fixtures import decode


def decode_words(tokens: Sequence[int]) -> str:
    """Sets words apart when it decodes, as a tokenizer of words does."""
    return " ".join(f"w{token}" for token in tokens)


def decode_stripped(tokens: Sequence[int]) -> str:
    """Drops the space before the first word, as SentencePiece does."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("hit", ["h", "i", "t"]),
        # Two, three and four bytes: the last one has the character.
        ("é", ["", "é"]),
        ("a€b", ["a", "", "", "€", "b"]),
        ("😀!", ["", "", "", "😀", "!"]),
    ],
)
def test_token_that_ends_within_a_character_has_no_text(text: str, pieces: list[str]) -> None:
    assert TokenDecoder(decode).split(list(text.encode())) == pieces


def test_spaces_that_decoding_makes_belong_to_the_word_behind_them() -> None:
    assert TokenDecoder(decode_words).split([1, 2, 3]) == ["w1", " w2", " w3"]
    assert TokenDecoder(decode_stripped).split([1, 2, 3]) == ["w1", " w2", " w3"]


def test_joined_they_are_the_answer_and_no_token_is_decoded_with_all_before_it() -> None:
    lengths: list[int] = []

    def watched(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode_words(tokens)

    tokens = list(range(400))
    assert "".join(TokenDecoder(watched).split(tokens)) == decode_words(tokens)
    assert {length for length in lengths if length < 400} <= {1, 2}


@pytest.mark.heavy
def test_answers_of_words_are_kept_with_their_spaces(tiny_policy: Path) -> None:
    tokenizer = ChatTokenizer(tiny_policy)
    tokens = tokenizer.prompt([{"role": "user", "content": "answer hit or stand"}])
    pieces = TokenDecoder(tokenizer.raw).split(tokens)
    assert pieces[:4] == ["<|im_start|>", " user", " answer", " hit"]
    assert "".join(pieces) == tokenizer.raw(tokens)
