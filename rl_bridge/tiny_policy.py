"""A policy small enough for two CPU cores: Qwen3's architecture, random weights, one token per word.

It is written in the Hugging Face layout, so everything downstream treats it like a real checkpoint.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
UNKNOWN: Final = "<|unknown|>"

# The tokenizer splits at white space and drops the line breaks of the usual template; spaces do the same.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def make_tiny_policy(folder: Path, texts: Iterable[str], *, seed: int, max_length: int = 64) -> Path:
    """Write a random checkpoint and its tokenizer, for `Task.make_policy`.

    Args:
        folder: Where to write. An existing folder is kept: a resumed run keeps the policy that it began with.
        texts: Everything the policy reads and writes. Its vocabulary is their words, split at white space; all other
            words map to one unknown token.
        seed: Determines the weights.
        max_length: The longest context in words, the chat template's own four included.

    Returns:
        The folder.
    """
    if folder.exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for one small file is noise
    partial_folder = folder.with_name(f"{folder.name}.partial")
    vocabulary = _write_tokenizer(partial_folder, texts)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=max_length,
            rope_theta=1_000_000.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=vocabulary.index(END),
            # A padding id would zero that row of the embedding, whose gradient then explodes in the norm.
            pad_token_id=None,
        )
    )
    model.to(torch.float32).save_pretrained(str(partial_folder))
    return partial_folder.replace(folder)


def _write_tokenizer(folder: Path, texts: Iterable[str]) -> list[str]:
    """Write a word-level tokenizer and return its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [UNKNOWN, START, END, "user", "assistant"]
    vocabulary += sorted({word for text in texts for word in text.split()} - set(vocabulary))
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([UNKNOWN, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return vocabulary
