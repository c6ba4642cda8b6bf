"""Records by the tokenizers of real checkpoints: of bytes, as Qwen's and Llama 3's are, and of words."""

from pathlib import Path

import pytest

from rl_bridge.records.token_text import TokenText
from rl_bridge.tokens.chat import ChatTokenizer

pytestmark = pytest.mark.heavy

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


def test_answers_of_words_are_kept_with_their_spaces(tiny_policy: Path) -> None:
    tokenizer = ChatTokenizer(tiny_policy)
    tokens = tokenizer.prompt([{"role": "user", "content": "answer hit or stand"}])
    pieces = TokenText(tokenizer.raw).pieces(tokens)
    assert pieces[:4] == ["<|im_start|>", " user", " answer", " hit"]
    assert "".join(pieces) == tokenizer.raw(tokens)
