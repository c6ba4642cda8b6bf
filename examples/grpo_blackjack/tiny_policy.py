"""A policy small enough for two CPU cores: Qwen3's architecture, random weights, one token a word.

It is written in the Hugging Face layout, so everything downstream treats it as it treats a real checkpoint.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from envs.blackjack_env.oracle import DECISION_STATES
from examples.grpo_blackjack.chat import prompt

START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|unknown|>"

# Words are split at white space, so the line breaks of the usual template would vanish; spaces say the same.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def make_tiny_policy(folder: Path, *, seed: int) -> Path:
    """Write a random checkpoint and its tokenizer.

    Args:
        folder: Made where it is missing.
        seed: Decides the weights.

    Returns:
        The folder.
    """
    disable_progress_bar()  # a bar for one small file is noise
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=64,
            rope_theta=1_000_000.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            # A padding id would zero that row of the embedding, whose gradient then explodes in the norm.
            pad_token_id=None,
        )
    )
    model.to(torch.float32).save_pretrained(str(folder))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word for state in DECISION_STATES for word in prompt(*state)[0]["content"].split()}
    vocabulary = [UNKNOWN, START, END, "user", "assistant", *sorted(words)]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([UNKNOWN, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN)
    fast.chat_template = CHAT_TEMPLATE
    return fast
