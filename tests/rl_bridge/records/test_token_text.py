"""The text of each token, for tokenizers that make it hard, and for real ones."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_bridge.records.record import TokenText
from rl_bridge.tokens.chat import ChatTokenizer
from tests.rl_bridge.records.records_fixtures import decode


def words(tokens: Sequence[int]) -> str:
    """Sets words apart when it decodes, as a tokenizer of words does."""
    return " ".join(f"w{token}" for token in tokens)


def stripped(tokens: Sequence[int]) -> str:
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
    assert TokenText(decode).pieces(list(text.encode())) == pieces


def test_bytes_that_are_no_character_stay_visible() -> None:
    assert TokenText(decode).pieces([0x61, 0xE2, 0x82]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(TokenText(decode).pieces([0xFF, 0x61])) == "\N{REPLACEMENT CHARACTER}a"


def test_spaces_that_decoding_makes_belong_to_the_word_behind_them() -> None:
    assert TokenText(words).pieces([1, 2, 3]) == ["w1", " w2", " w3"]
    assert TokenText(stripped).pieces([1, 2, 3]) == ["w1", " w2", " w3"]


def test_joined_they_are_the_answer_and_no_token_is_decoded_with_all_before_it() -> None:
    longest = 0

    def watched(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens)) if len(tokens) < 400 else longest
        return words(tokens)

    tokens = list(range(400))
    assert "".join(TokenText(watched).pieces(tokens)) == words(tokens)
    assert longest <= 2


def test_prompt_of_siblings_is_decoded_once() -> None:
    asked: list[Sequence[int]] = []

    def watched(tokens: Sequence[int]) -> str:
        asked.append(tokens)
        return decode(tokens)

    text = TokenText(watched)
    assert [text.whole([104, 105]), text.whole((104, 105)), text.whole([])] == ["hi", "hi", ""]
    assert len(asked) == 1


TEXTS = (
    'Well , I look it up .<tool_call>\n{"name": "größe", "arguments": {"ß": "日本語"}}\n</tool_call>',
    "🧶 ropes 👩‍👩‍👧 walk, \t tabs  and   spaces\n\n\n",
    "don't , do n't ; l'été — ﷽",
)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer by byte pairs that has learned next to nothing: most characters take several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["ropes walk and look it up", "the name of the arguments"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("of_bytes")
    fast.save_pretrained(str(folder))
    return ChatTokenizer(folder)


@pytest.mark.heavy
@pytest.mark.parametrize("text", TEXTS)
def test_answers_of_bytes_are_kept_to_the_letter(of_bytes: ChatTokenizer, text: str) -> None:
    tokens = of_bytes.prompt([{"role": "assistant", "content": text}])
    whole = f"<|im_start|>assistant\n{text}<|im_end|>\n"
    assert of_bytes.raw(tokens) == whole
    pieces = TokenText(of_bytes.raw).pieces(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == whole
    assert pieces[0] == "<|im_start|>"
    assert "\N{REPLACEMENT CHARACTER}" not in whole
    # One token after the other in context comes to the same where no token is a part of a character.
    assert [p for p in TokenText(of_bytes.raw)._in_context(tokens) if p] == [p for p in pieces if p]


@pytest.mark.heavy
def test_answers_of_words_are_kept_with_their_spaces(tiny_policy: Path) -> None:
    tokenizer = ChatTokenizer(tiny_policy)
    tokens = tokenizer.prompt([{"role": "user", "content": "answer hit or stand"}])
    pieces = TokenText(tokenizer.raw).pieces(tokens)
    assert pieces[:4] == ["<|im_start|>", " user", " answer", " hit"]
    assert "".join(pieces) == tokenizer.raw(tokens)
