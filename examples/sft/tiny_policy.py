"""A tool-calling policy small enough for two CPU cores: Qwen3's architecture with random weights.

It is written in the Hugging Face layout, so everything downstream treats it like any other checkpoint. Its chat
template and its calls are Qwen's, except that the list of tools is shortened to names and parameters: the full schemas
would be most of what so small a model reads.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rl_bridge.data.traces import ASSISTANT, Trace

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY: Final = 1024
LONGEST: Final = 1024

CHAT_TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\n<tool_call>\n"
    "{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\n"
    "{% endfor %}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A word is never merged with its neighbours, so that it is the same token wherever it is copied to. A digit is one
# token; text between words may become one, and so may a line break in code within JSON.
_PIECES: Final = r"\\n *|[A-Za-z_]+|[0-9]|[^A-Za-z_0-9\\]+|\\"


def make_tool_policy(
    folder: Path, traces: Iterable[Trace], *, seed: int, width: int = 128, layers: int = 3
) -> Path:
    """Write a random checkpoint, with a tokenizer for the texts it will read.

    Args:
        folder: Created if missing.
        traces: Traces whose words the tokenizer learns. Other text is tokenised byte by byte.
        seed: Seed of the weights.
        width: Width of the hidden state; a multiple of 64.
        layers: Number of layers.

    Returns:
        The folder.
    """
    disable_progress_bar()  # a bar for one small file is noise
    tokenizer = _tokenizer(traces)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            head_dim=32,
            max_position_embeddings=LONGEST,
            rope_theta=10_000.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            # A padding id would zero that row of the embedding, whose gradient then explodes in the norm.
            pad_token_id=None,
        )
    )
    model.to(torch.float32).save_pretrained(str(folder))
    return folder


def _tokenizer(traces: Iterable[Trace]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _texts(traces),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _texts(traces: Iterable[Trace]) -> Iterator[str]:
    """Yield texts like those that the chat template makes of traces."""
    for trace in traces:
        yield "system"
        for tool in trace.tools:
            function = tool["function"]
            yield f"{function['name']}({', '.join(function['parameters']['properties'])})"
        for message in trace.messages:
            yield message["role"] if message["role"] == ASSISTANT else "user"
            yield message["content"]
